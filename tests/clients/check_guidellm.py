"""guidellm: its benchmark with synthetic prompts, by chat and by completions, streamed and not."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

NUM_REQUESTS, NUM_TOKENS = 12, 16


def benchmark(route: str, stream: bool) -> dict[str, Any]:
    """The metrics of one benchmark."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "report.json"
        options = {
            "backend": f"kind=openai_http,target={harness.URL},request_format={route},stream={stream}",
            "profile": "kind=concurrent,streams=4",
            "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
            "tokenizer": f"kind=huggingface_auto,model={harness.TOKENIZER}",
            "data": f"kind=synthetic_text,prompt_tokens=32,output_tokens={NUM_TOKENS}",
            "output": f"kind=json,path={path}",
        }
        command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console-interactive"]
        command += [part for name, value in options.items() for part in (f"--{name}", value)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        subprocess.run(command, check=True, env=environment)
        (result,) = json.loads(path.read_text())["benchmarks"]
    return result["metrics"]


def check(route: str, stream: bool) -> None:
    harness.wait_idle()
    before = harness.metric("vllm:generation_tokens_total")
    metrics = benchmark(route, stream)
    totals = metrics["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (NUM_REQUESTS, 0, 0), totals
    counts = metrics["output_token_count"]["successful"]
    assert (counts["min"], counts["max"]) == (NUM_TOKENS, NUM_TOKENS), counts
    assert metrics["prompt_token_count"]["successful"]["min"] >= 32
    assert harness.metric("vllm:generation_tokens_total") - before >= NUM_REQUESTS * NUM_TOKENS
    if stream:
        assert metrics["request_streaming_iterations_count"]["successful"]["median"] > 1
        assert metrics["time_to_first_token_ms"]["successful"]["median"] > 0


def chat_streams() -> None:
    check("/v1/chat/completions", stream=True)


def completion_streams() -> None:
    check("/v1/completions", stream=True)


def chat_answers() -> None:
    check("/v1/chat/completions", stream=False)


if __name__ == "__main__":
    harness.run(chat_streams, completion_streams, chat_answers)
