"""aider: the editor in a terminal: it streams an answer, and says where its prompt does not fit in the context."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import harness

# Its prompt takes more than the demo's context. What is beyond that is noise, and short.
LONG = ["--max-model-len", "8192", "--hf-overrides", '{"max_position_embeddings": 8192}']
SHORT = ["--override-generation-config", '{"max_new_tokens": 40}']


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
    command = [harness.PYTHON, "-m", "quire", "serve", "demo", "--port", "0", "--host", "127.0.0.1", *LONG, *SHORT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            lines = iter(server.stdout or ())
            url = next(found[1] for line in lines if (found := re.search(r"ready on (http://[\d.:]+)", line)))
            said = aider(url, "--message", "Hello")
            written, read = (harness.metric(f"vllm:{kind}_tokens_total", url) for kind in ("generation", "prompt"))
        finally:
            server.terminate()
    assert written == 40, said
    assert read > 512, said
    assert "litellm." not in said, said  # as its errors begin


harness.run(a_context_that_is_too_small_is_named, a_long_context_answers)
