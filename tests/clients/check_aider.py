"""aider: the editor in a terminal: it asks, and says that its prompt does not fit in the demo's small context."""

import subprocess
import sys
import tempfile
from pathlib import Path

import harness


def aider(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("aider")), "--model", "openai/demo", "--yes-always", "--no-git"]
    command += ["--openai-api-base", f"{harness.URL}/v1", "--openai-api-key", "none", "--no-check-update"]
    command += ["--no-show-model-warnings", "--no-analytics", "--map-tokens", "0", "--no-pretty", *arguments]
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL)
    return done.stdout + done.stderr


def a_context_that_is_too_small_is_named() -> None:
    assert "context" in aider("--message", "Hello")


harness.run(a_context_that_is_too_small_is_named)
