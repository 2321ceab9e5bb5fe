"""aider: the editor in a terminal: it streams an answer, and says where its prompt does not fit in the context."""

import subprocess
import sys
import tempfile
from pathlib import Path

import harness


def aider(url: str, *arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("aider")), "--model", "openai/demo", "--yes-always", "--no-git"]
    command += ["--openai-api-base", f"{url}/v1", "--openai-api-key", "none", "--no-check-update"]
    command += ["--no-show-model-warnings", "--no-analytics", "--map-tokens", "0", "--no-pretty", *arguments]
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL)
    return done.stdout + done.stderr


def a_context_that_is_too_small_is_named() -> None:
    said = aider(harness.URL, "--message", "Hello")
    assert "exhausted context window" in said, said


def a_long_context_answers() -> None:
    with harness.serving(*harness.LONG, *harness.SHORT) as url:
        said = aider(url, "--message", "Hello")
        written, read = (harness.metric(f"vllm:{kind}_tokens_total", url) for kind in ("generation", "prompt"))
    assert written == 40, said
    assert read > 512, said
    assert "litellm." not in said, said  # as its errors begin


harness.run(a_context_that_is_too_small_is_named, a_long_context_answers)
