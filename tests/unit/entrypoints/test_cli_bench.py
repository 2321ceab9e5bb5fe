"""`quire bench` against a fake `LLM`: what is run, how often, and the figures that come out."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.entrypoints.cli.main import main


def test_bench_latency(fake_llm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "latency.json"
    shape = [
        "--input-len",
        "6",
        "--output-len",
        "7",
        "--batch-size",
        "3",
        "--num-iters-warmup",
        "2",
        "--num-iters",
        "4",
    ]
    assert main(["bench", "latency", "m", *shape, "--output-json", str(path), "--seed", "5"]) == 0
    (llm,) = fake_llm.made
    assert llm.args == EngineArgs(model="m", enable_prefix_caching=False, seed=5)
    assert len(llm.calls) == 2 + 4
    prompts, params = llm.calls[0]
    assert [len(p["prompt_token_ids"]) for p in prompts] == [6, 6, 6]
    assert all(0 <= t < 50 for p in prompts for t in p["prompt_token_ids"])
    assert (params.max_tokens, params.ignore_eos) == (7, True)
    figures = json.loads(path.read_text())
    assert len(figures["latencies"]) == 4
    assert set(figures["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert (figures["kernels"], figures["num_threads"]) == ("avx512", 2)
    printed = capsys.readouterr().out
    assert "Kernels: avx512; threads: 2" in printed
    assert f"Avg latency: {figures['avg_latency']:.4f} seconds" in printed
    main(["bench", "latency", "m", *shape, "--seed", "5"])
    assert fake_llm.made[1].calls[0][0] == prompts


def test_bench_throughput_random(fake_llm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "throughput.json"
    shape = ["--num-prompts", "4", "--input-len", "3", "--output-len", "9"]
    assert main(["bench", "throughput", *shape, "--output-json", str(path)]) == 0
    figures = json.loads(path.read_text())
    assert (figures["num_requests"], figures["num_prompt_tokens"], figures["num_output_tokens"]) == (4, 12, 36)
    assert figures["tokens_per_second"] == pytest.approx(48 / figures["elapsed_time"])
    assert (figures["kernels"], figures["num_threads"]) == ("avx512", 2)
    assert "Kernels: avx512; threads: 2\nThroughput: " in capsys.readouterr().out
    assert fake_llm.made[0].args.enable_prefix_caching


def test_several_outputs_of_a_prompt(fake_llm: Any) -> None:
    shape = ["--n", "3", "--input-len", "3", "--output-len", "9"]
    assert main(["bench", "throughput", *shape, "--num-prompts", "2"]) == 0
    assert main(["bench", "latency", *shape, "--num-iters", "1"]) == 0
    for made in fake_llm.made:
        params = made.calls[0][1]
        assert {each.n for each in (params if isinstance(params, list) else [params])} == {3}


def test_bench_throughput_of_sharegpt(fake_llm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ShareGPT_V3.json"
    talks = [(f"Question {number}, of more than 4 tokens", "y" * 4 * number) for number in range(10)]
    talks += [("Hi", "y" * 40), ("x" * 4100, "y" * 40), ("x" * 4000, "y" * 4200)]
    rows: list[Any] = [
        {"conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}]} for a, b in talks
    ]
    path.write_text(json.dumps([*rows, {"id": "empty", "conversations": []}]))
    command = ["bench", "throughput", "--dataset-name", "sharegpt", "--dataset-path", str(path)]
    assert main(command) == 0
    ((prompts, params),) = fake_llm.made[0].calls
    lengths = {prompt: one.max_tokens for prompt, one in zip(prompts, params, strict=True)}
    assert lengths == {question: number for number, (question, _) in enumerate(talks[:10]) if number >= 4}
    assert prompts != sorted(prompts)
    assert main([*command, "--num-prompts", "2"]) == 0
    assert fake_llm.made[1].calls[0][0] == prompts[:2]
    for text in ("{}", "[]"):
        path.write_text(text)
        assert main(command) == 2
    assert main(command[:-2]) == main(["bench", "throughput", "--dataset-name", "random", *command[-2:]]) == 2
    errors = capsys.readouterr().err
    for shown in (
        "ShareGPT_V3.json: Expected `array`",
        "sharegpt needs a --dataset-path",
        "random takes no --dataset-p",
    ):
        assert shown in errors


def test_bench_throughput_of_a_dataset(fake_llm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"prompt": "a", "max_tokens": 2}, {"prompt": [4, 5]}, {"prompt": "c", "other": 1}]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "d.txt").write_text("a\nb\n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    assert main(["bench", "throughput", "--dataset", str(tmp_path / "d.jsonl"), "--output-len", "8"]) == 0
    assert main(["bench", "throughput", "--dataset", str(tmp_path / "d.txt"), "--num-prompts", "1"]) == 0
    prompts, params = fake_llm.made[0].calls[0]
    assert prompts == ["a", [4, 5], "c"]
    assert [p.max_tokens for p in params] == [2, 8, 8]
    assert fake_llm.made[1].calls[0][0] == ["a"]
    assert main(["bench", "throughput", "--dataset", str(tmp_path / "bad.jsonl")]) == 2
    assert "record 2" in capsys.readouterr().err
    assert main(["bench", "throughput", "--dataset-path", str(tmp_path / "gone.txt")]) == 2
    assert "--dataset-path" in capsys.readouterr().err
    assert len(fake_llm.made) == 2


def test_a_record_may_have_other_ends_of_lines_in_it(fake_llm: Any, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "a\u2028b\u0085c"}\r\n{"prompt": "d"}\n', encoding="utf-8")
    assert main(["bench", "throughput", "--dataset-path", str(tmp_path / "d.jsonl")]) == 0
    (tmp_path / "d.txt").write_text("a\fb\nc\n")
    assert main(["generate", "--prompts-file", str(tmp_path / "d.txt")]) == 0
    assert [llm.calls[0][0] for llm in fake_llm.made] == [["a\u2028b\u0085c", "d"], ["a\fb", "c"]]
