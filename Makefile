# Every target sets up what it needs in .venv, once; PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
PY := .venv/bin/python
PIP_INSTALL := $(PY) -m pip install -qq --disable-pip-version-check --no-input --constraint constraints.txt

# Threads that wait for each other asleep, not spinning: on a busy machine small models run ten times faster for it.
demo test check: export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test check format bench clean help
.DELETE_ON_ERROR:

help:
	@echo "make demo     set up, and generate text with the bundled model"
	@echo "make test     all tests"
	@echo "make check    lint, types, import contracts, size gate and the quick tests"
	@echo "make format   let ruff put the code in order"
	@echo "make bench    latency and throughput of the bundled model"
	@echo "make clean    remove .venv and caches"

demo: .venv/runtime.stamp
	@$(PY) -m quire generate demo --temperature 0.7 --top-p 0.95 --max-tokens 96 \
	    --prompt "The old house stood at the edge of the wood, and" \
	    --prompt "\"I have been waiting for you,\" said the" \
	    --prompt "It was a bright morning in spring when" \
	    --prompt "Nobody in the village knew why"

test: .venv/dev.stamp
	@$(PY) -m pytest

check: .venv/dev.stamp
	@$(PY) tools/check.py

format: .venv/dev.stamp
	@$(PY) -m ruff check --fix --quiet . || true
	@$(PY) -m ruff format .

bench: .venv/runtime.stamp
	@$(PY) -m quire bench latency demo --num-iters-warmup 2 --num-iters 5
	@$(PY) -m quire bench throughput demo

clean:
	rm -rf .venv .pytest_cache .ruff_cache .import_linter_cache .hypothesis dist
	find quire tests tools examples -name __pycache__ -type d -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "Quire needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | head -n 1)." >&2; \
	    echo "Name another: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "set-up: .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv

.venv/runtime.stamp: pyproject.toml constraints.txt | .venv/bin/python
	@echo "set-up: Quire and what it runs on (torch is the large one)"
	@$(PIP_INSTALL) --editable .
	@touch $@

.venv/dev.stamp: .venv/runtime.stamp
	@echo "set-up: test and development tools"
	@$(PIP_INSTALL) --editable '.[test,dev]'
	@touch $@
