# Every target sets up what it needs in .venv, once; PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
PY := .venv/bin/python
# Without the kernels: they are built here, where a change of one costs seconds and no network.
PIP_INSTALL := QUIRE_NO_NATIVE=1 \
    $(PY) -m pip install -qq --disable-pip-version-check --no-input --constraint constraints.txt

CPU_INDEX ?= https://download.pytorch.org/whl/cpu
WITHOUT_GPU := ! ls /dev/nvidia0 /dev/kfd >/dev/null 2>&1 && [ "$$(uname)" = Linux ]
# It takes minutes the first time: pip says what it loads, with bars at a terminal.
PIP_INSTALL_ALOUD := $(subst -qq,,$(PIP_INSTALL))

LIBRARY := quire/ops/native/_kernels.so
# The machine's own cmake and ninja, or else those that set-up puts into .venv.
WITH_CMAKE := PATH="$$PATH:$(CURDIR)/.venv/bin"
# QUIRE_NO_NATIVE=1 leaves the kernels out here as it does with pip.
NATIVE := $(if $(QUIRE_NO_NATIVE),,build/native.stamp)

# Tests run in this many processes, three on two cores, as a quarter of each one's time is waiting. A file's tests stay
# together, as they share what they have loaded.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); n=$$((n + n / 2)); echo $$((n < 4 ? n : 4)))
PYTEST := $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Threads that wait for each other asleep, not spinning: on a busy machine small models run ten times faster for it.
demo test test-levels test-arm test-asan test-clients test-ray test-nightly check: export OMP_WAIT_POLICY := PASSIVE
# Else each process of theirs, and every server that a test starts, compiles all modules anew.
test test-levels test-arm test-asan test-clients test-ray test-nightly check: export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-levels test-arm test-asan test-clients test-ray test-nightly check native format bench clean help
.DELETE_ON_ERROR:

help:
	@echo "make demo          set up, and generate text with the bundled model"
	@echo "make test          all tests, in WORKERS=$(WORKERS) processes"
	@echo "make check         lint, types, import contracts, size gate and the quick tests"
	@echo "make native        build the C++ kernels anew, and show what is wrong with them"
	@echo "make test-asan     the kernels' tests under GCC's address and undefined-behaviour sanitizers"
	@echo "make test-levels   the tests of the AMX and AVX-512 kernels on a CPU without them, emulated in plain C++"
	@echo "make test-arm      the kernels of 64-bit Arm, cross-compiled and emulated, against each other (g++-aarch64-linux-gnu, qemu-user)"
	@echo "make test-clients  real clients against a real server, each in an environment of its own (downloads them)"
	@echo "make test-ray      the tests of workers on a Ray cluster, of two nodes too (installs Ray)"
	@echo "make test-nightly  load and fault tests at full length and whole sweeps, which takes hours"
	@echo "make format        let ruff put the code in order"
	@echo "make bench         latency and throughput of the bundled model"
	@echo "make clean         remove .venv, build and caches"

demo: .venv/runtime.stamp $(NATIVE)
	@$(PY) -m quire generate demo --temperature 0.7 --top-p 0.95 --max-tokens 96 \
	    --prompt "The old house stood at the edge of the wood, and" \
	    --prompt "\"I have been waiting for you,\" said the" \
	    --prompt "It was a bright morning in spring when" \
	    --prompt "Nobody in the village knew why"

test: .venv/dev.stamp $(NATIVE)
	@$(PYTEST)

check: export WORKERS := $(WORKERS)
check: .venv/dev.stamp $(NATIVE)
	@$(PY) tools/check.py

format: .venv/dev.stamp
	@$(PY) -m ruff check --fix --quiet . || true
	@$(PY) -m ruff format .

bench: .venv/runtime.stamp $(NATIVE)
	@$(PY) -m quire bench latency demo --num-iters-warmup 2 --num-iters 5
	@$(PY) -m quire bench throughput demo

# Moved into place in one piece: a process that runs the old library keeps it.
native: build/native/build.ninja
	@$(WITH_CMAKE) cmake --build build/native
	@mkdir -p $(dir $(LIBRARY))
	@cmp -s build/native/_kernels.so $(LIBRARY) || \
	    { cp build/native/_kernels.so $(LIBRARY).new && mv -f $(LIBRARY).new $(LIBRARY); }

# Python is not built with the sanitizers, so they have to be there before it; and before them is too early for them to
# see libstdc++'s exceptions, unless that is there too. --capture=sys: pytest would keep the report to itself otherwise.
test-asan: .venv/dev.stamp build/asan/build.ninja
	@$(WITH_CMAKE) cmake --build build/asan
	@cxx=$$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' build/asan/CMakeCache.txt); preload=; \
	for name in libasan.so libubsan.so libstdc++.so.6; do preload="$$preload $$($$cxx -print-file-name=$$name)"; done; \
	LD_PRELOAD="$$preload" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	    QUIRE_NATIVE_LIBRARY=$(CURDIR)/build/asan/_kernels.so $(PYTEST) --capture=sys \
	    tests/unit/*/test_native*.py tests/unit/attention/test_trees.py tests/engine/test_draft_rounds.py

# The levels that this CPU may lack, in plain C++: AMX's tiles where the rest of that level is there, or all of AVX-512, too.
HAS_AVX512 = $(shell grep -qm1 avx512_bf16 /proc/cpuinfo 2>/dev/null && echo yes)
EMULATED = $(if $(HAS_AVX512),-DQUIRE_EMULATE_AMX=ON,-DQUIRE_EMULATE_AVX512=ON -DQUIRE_OPTIMIZE=-O1)
# What emulated instructions take says nothing of the CPU's: QUIRE_FLOATS says which to use.
test-levels: .venv/dev.stamp build/emulated/build.ninja
	@$(WITH_CMAKE) cmake --build build/emulated
	@QUIRE_NATIVE_LIBRARY=$(CURDIR)/build/emulated/_kernels.so QUIRE_FLOATS=0 $(PYTEST) \
	    -k "amx$(if $(HAS_AVX512),, or avx512)" -m "slow or not slow" tests/unit/ops tests/unit/attention

# Also part of make test, where the cross compiler and the emulator are there.
test-arm: .venv/dev.stamp
	@$(PY) -m pytest -rs -k arm tests/unit/ops/test_levels.py

test-clients: .venv/dev.stamp $(NATIVE)
	@$(PY) tests/clients/run.py

test-ray: export QUIRE_NIGHTLY := 1
test-ray: .venv/dev.stamp $(NATIVE)
	@$(PIP_INSTALL) --editable '.[ray]'
	@$(PY) -m pytest tests/engine/test_ray.py tests/server/test_ray.py

# What measures comes first, by itself. QUIRE_SOAK_SECONDS=3600 makes the soak an hour long, not ten minutes.
LOAD := tests/server/test_load.py
test-nightly: export QUIRE_NIGHTLY := 1
test-nightly: .venv/dev.stamp $(NATIVE)
	@$(PY) -m pytest $(LOAD)
	@$(PYTEST) --ignore $(LOAD)

clean:
	rm -rf .venv build $(LIBRARY) .pytest_cache .ruff_cache .import_linter_cache .hypothesis .schemathesis dist
	find quire tests tools examples benchmarks -name __pycache__ -type d -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "Quire needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | head -n 1)." >&2; \
	    echo "Name another: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "set-up: .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv

# Without a GPU torch for CPUs will do, which is a fifth as large: PyTorch's own index has it, where that answers. What
# fails there is left to the second line, as is the rest.
.venv/runtime.stamp: pyproject.toml constraints.txt | .venv/bin/python
	@echo "set-up: Quire and what it runs on (torch is the large one)"
	@if $(WITHOUT_GPU) && $(PY) tools/index_answers.py $(CPU_INDEX); then \
	    echo "set-up: torch for CPUs, from $(CPU_INDEX)"; \
	    $(PIP_INSTALL_ALOUD) --index-url $(CPU_INDEX) torch || true; fi
	@$(PIP_INSTALL_ALOUD) --editable .
	@touch $@

.venv/dev.stamp: .venv/runtime.stamp
	@echo "set-up: test and development tools"
	@$(PIP_INSTALL) --editable '.[test,dev]'
	@touch $@

# The directory itself too, for files that came or went. A failure is no obstacle: Quire runs without the library; but
# never with that of other sources.
build/native.stamp: CMakeLists.txt csrc $(wildcard csrc/*) | .venv/bin/python
	@echo "set-up: native kernels (C++)"
	@mkdir -p build
	@{ $(MAKE) --no-print-directory native 2>&1 || echo "failed"; } | tee build/native.log | \
	    sed -un 's/^\(\[[0-9]*\/[0-9]*\]\) Building [A-Z]* object .*\/\([^/]*\)\.o$$/    \1 \2/p'
	@[ "$$(tail -n 1 build/native.log)" != failed ] || { rm -f $(LIBRARY); \
	    echo "set-up: the native kernels did not build, Quire is slower without; 'make native' says why"; }
	@touch $@

build/%/build.ninja: | .venv/bin/python
	@{ command -v cmake && command -v ninja; } >/dev/null || $(PIP_INSTALL) cmake ninja
	@rm -rf build/$*
	@$(WITH_CMAKE) cmake -S . -B build/$* -G Ninja $(if $(filter asan,$*),-DQUIRE_ASAN=ON) \
	    $(if $(filter emulated,$*),$(EMULATED))
