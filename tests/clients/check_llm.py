"""The command `llm`: by its Ollama plugin (models found, options, conversations, schemas), and by OpenAI's API."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import harness

HOME = Path(tempfile.mkdtemp())
(HOME / "extra-openai-models.yaml").write_text(
    f"- model_id: quire-demo\n  model_name: demo\n  api_base: {harness.URL}/v1\n  supports_schema: true\n"
)
ENV = {**os.environ, "LLM_USER_PATH": str(HOME), "OLLAMA_HOST": harness.URL, "OPENAI_API_KEY": "none"}
PLACE = '{"place": {"enum": ["box", "bag"]}}'
SCHEMA = f'{{"type": "object", "properties": {PLACE}, "required": ["place"], "additionalProperties": false}}'


def llm(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("llm")), *arguments]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def the_plugin_finds_the_model() -> None:
    assert "Ollama: ollama/demo:latest" in llm("models")


def answers_and_options() -> None:
    short = llm("-m", "ollama/demo:latest", "Tell me a story.", "-o", "temperature", "0", "-o", "num_predict", "5")
    whole = llm(
        "-m",
        "ollama/demo:latest",
        "Tell me a story.",
        "-o",
        "temperature",
        "0",
        "-o",
        "num_predict",
        "20",
        "--no-stream",
    )
    assert 0 < len(short) < len(whole)
    assert whole.startswith(short)


def a_conversation_goes_on() -> None:
    llm("-m", "ollama/demo:latest", "Hello", "-o", "num_predict", "8")
    assert llm("-c", "And then?", "-o", "num_predict", "8")


def schemas() -> None:
    for model in ("ollama/demo:latest", "quire-demo"):
        assert json.loads(llm("-m", model, "A box?", "--schema", SCHEMA))["place"] in ("box", "bag")


def by_openais_api() -> None:
    assert llm("-m", "quire-demo", "Tell me a story.", "-o", "max_tokens", "8")


harness.run(the_plugin_finds_the_model, answers_and_options, a_conversation_goes_on, schemas, by_openais_api)
