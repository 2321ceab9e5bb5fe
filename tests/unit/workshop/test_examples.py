"""The examples and the command line run as they stand, in processes of their own, with the bundled model."""

import subprocess
import sys
from pathlib import Path

import pytest

from quire.entrypoints.cli.main import main

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# What these do other tests do as well, and each takes some five seconds.
_NIGHTLY = {"async_streaming", "chat_batch", "data_parallel", "prefix_caching", "reproducibility", "sleep_mode"}
_NIGHTLY |= {
    "embeddings",
    "generate",
    "llm_engine",
    "logits_processor",
    "metrics",
    "speculation",
}  # others' code, mostly

_LAST_WORDS = {
    "prefix_caching": "Generated texts are the same: True",
    "metrics": "prompt tokens",
    "reproducibility": "the same in other batches, chunks and engines: True",
    "logits_processor": "all tokens are different: True",
    "async_streaming": "pieces",
    "sleep_mode": "the same text: True",
    "data_parallel": "24 answers; the same as those of one engine: True",
}

pytestmark = pytest.mark.slow


def run(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, input=given, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done


def check_example(name: str, lines: list[str]) -> None:
    assert len(lines) >= 3
    if name == "seeded_sampling_n":
        assert lines[-1] == "tokens equal in a batch: True - logprobs equal: True"
    if (last := _LAST_WORDS.get(name)) is not None:
        assert lines[-1].endswith(last)
    if name == "speculation":
        assert all("the same tokens: True" in line for line in lines)


_ONE_AFTER_ANOTHER = """
import runpy, sys
for path in sys.argv[1:]:
    print(f"== {path}", file=sys.stderr, flush=True)
    print("==", flush=True)
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")
"""


def test_examples_run() -> None:
    """One after another in one process, which would import for half of the time otherwise."""
    examples = [path for path in EXAMPLES if path.stem not in _NIGHTLY]
    printed = run("-c", _ONE_AFTER_ANOTHER, *(str(path.relative_to(ROOT)) for path in examples)).stdout
    for path, part in zip(examples, printed.split("==\n")[1:], strict=True):
        check_example(path.stem, part.splitlines())


@pytest.mark.nightly
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path) -> None:
    check_example(example.stem, run(str(example.relative_to(ROOT))).stdout.splitlines())


def test_generate_streams_what_a_batch_gives() -> None:
    """A prompt piped in and streamed, and the same prompt among others: one text."""
    flags = ["-m", "quire", "generate", "demo", "--max-tokens", "24", "--temperature", "0"]
    alone = run(*flags, given="Once upon a time")
    assert alone.stdout.strip()
    assert " out in " in alone.stderr
    several = run(*flags, "--prompt", "Once upon a time", "--prompt", "In the end")
    assert " ".join(alone.stdout.split()) in " ".join(several.stdout.split())
    assert "out/s" in several.stdout.splitlines()[-1]
    assert "toks/s" in several.stderr


def test_chat_answers_piped_questions() -> None:
    done = run("-m", "quire", "chat", "demo", "--max-tokens", "12", given="Hello.\nHow are you?\n")
    assert len(done.stdout.strip().splitlines()) >= 1


def test_bench_latency_runs(capsys: pytest.CaptureFixture[str]) -> None:
    shape = "--input-len 4 --output-len 4 --batch-size 2 --num-iters-warmup 0 --num-iters 2"
    assert main(["bench", "latency", "demo", *shape.split()]) == 0
    assert "Avg latency: " in capsys.readouterr().out
