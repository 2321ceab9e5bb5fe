"""vLLM's ways to write flags: what the parser makes of them, and what it says of flags that are not there."""

import argparse
import logging
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.config.engine_args import EngineArgs
from quire.entrypoints.cli.files import read_text
from quire.entrypoints.cli.flags import engine_args_from
from quire.entrypoints.cli.main import build_parser, main
from quire.entrypoints.cli.parser import Parser
from quire.entrypoints.not_yet import engine_args
from quire.errors import ConfigError, NotYetSupportedError


def parse(*arguments: str) -> EngineArgs:
    return engine_args_from(build_parser().parse_args(["generate", *arguments]))


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("--max_model_len=8", {"max_model_len": 8}),
        ("--disable-prefix-caching", {"enable_prefix_caching": False}),
        ("--enable-log-stats", {"disable_log_stats": False}),
        ("--speculative-config.method ngram", {"speculative_config": {"method": "ngram"}}),
        ("--speculative_config.method=ngram", {"speculative_config": {"method": "ngram"}}),
        (
            "--spec-method ngram -sc.num_speculative_tokens 3",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        ),
        ("--hf-overrides.a.b 1 --hf-overrides.a.c+ x,y", {"hf_overrides": {"a": {"b": 1, "c": ["x", "y"]}}}),
        ("--hf-overrides.a -1.5", {"hf_overrides": {"a": -1.5}}),
        ("--hf-overrides.a 1 --hf-overrides.a.b 2", {"hf_overrides": {"a": {"b": 2}}}),
        ("--hf-overrides.a.b 1 --hf-overrides.a 2", {"hf_overrides": {"a": 2}}),
        ("--device-memory-utilization 0.5", {"gpu_memory_utilization": 0.5}),
        ("--kv-offloading-size 2", {"swap_space": 2.0}),
        ("--max-model-len auto", {}),
        ("-ep -tp 2", {"enable_expert_parallel": True, "tensor_parallel_size": 2}),
    ],
)
def test_spellings(line: str, options: dict[str, Any]) -> None:
    assert parse(*line.split()) == EngineArgs(**options)


@pytest.mark.parametrize("flag", ["-d", "-s", "-e", "-sc2", "-x"])
def test_flags_of_one_dash_are_not_abbreviated(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """-d is no -dp, nor -e -ep."""
    with pytest.raises(SystemExit):
        main(["generate", flag, "1", "--prompt", "x"])
    assert capsys.readouterr().err.startswith(f"error: unknown argument {flag}.")


def test_auto_is_for_numbers_that_need_not_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_args(max_model_len="auto", dtype="auto", model="auto") == EngineArgs("auto")
    assert parse("--max-model-len", "auto") == parse("--max-model-len", "-1") == parse("--max-model-len=-1") == parse()
    assert engine_args(max_model_len=np.int64(-1)) == EngineArgs(max_model_len=-1) == EngineArgs()
    with pytest.raises(ConfigError, match="^max_model_len must be an integer, at least 1, got -2.$"):
        parse("--max-model-len", "-2")
    with pytest.raises(ConfigError, match="^num_kv_blocks/num_gpu.* must be an integer, at least 1, got -1.$"):
        parse("--num-kv-blocks", "-1")
    with pytest.raises(SystemExit):
        parse("--block-size", "auto")
    assert "'auto' is not a whole number" in capsys.readouterr().err


def test_a_prompt_has_a_short_flag() -> None:
    namespace = build_parser().parse_args(["generate", "-p", "Once", "-pp", "2", "-t4"])
    assert (namespace.prompt, namespace.pipeline_parallel_size, namespace.threads) == (["Once"], 2, 4)


def test_values_stay_as_they_are() -> None:
    namespace = build_parser().parse_args(["generate", "--prompt", "Once --a_b=c", "--prompt", "a.b_c", "demo"])
    assert namespace.prompt == ["Once --a_b=c", "a.b_c"]
    assert build_parser().parse_known_args(["generate", "--", "-O3"])[0].model_argument == "-O3"


@pytest.mark.parametrize("name", ["profile", "header", "task=x", "no_stream", "insecure", "compilation_config"])
def test_a_value_that_is_a_flags_name_is_a_value(name: str) -> None:
    namespace, unknown = build_parser().parse_known_args(["generate", name, "--prompt", name, "--seed", "0"])
    assert (namespace.model_argument, namespace.prompt, namespace.seed, unknown) == (name, [name], 0, [])


@pytest.mark.parametrize(
    ("line", "warnings"),
    [
        ("-O3", ["--optimization-level"]),
        ("-O 3", ["--optimization-level"]),
        ("-O=2 --async-scheduling", ["--optimization-level", "--async-scheduling"]),
        ("--compilation-config.mode 3 -cc {}", ["--compilation-config", "-cc"]),
        ("--attention_backend=X", ["--attention-backend"]),
        ("--cudagraph-capture-sizes 1 2 4 --seed 0", ["--cudagraph-capture-sizes"]),
        ("--no-async-scheduling --no-enable-eplb --enable-sleep-mode --runner generate --runner=auto", []),
        ("--api-server-count 1 -dcp 1", []),
        ('--limit-mm-per-prompt {"image":2}', ["--limit-mm-per-prompt"]),
        ("--allowed-media-domains a.org b.org --seed 0", ["--allowed-media-domains"]),
    ],
)
def test_flags_without_effect(line: str, warnings: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """No value of theirs is taken for the model, before or after it."""
    with caplog.at_level(logging.WARNING):
        assert (
            parse(*line.split(), "some/model") == parse("some/model", *line.split()) == EngineArgs(model="some/model")
        )
    assert [message.split()[0] for message in caplog.messages] == warnings * 2
    assert all(" has no effect: " in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--convert classify", "^--convert is not supported yet for that: .* says so.$"),
        ("--enable-eplb", "^--enable-eplb is not supported yet: experts stay on their ranks. Leave it out.$"),
        ("--eplb_config.window_size 3", "^--eplb-config is not supported yet"),
        ("-dcp 2", "^-dcp is not supported yet: .* Use tensor_parallel_size.$"),
        ("--task embed", "^--task is not an option any more, .* classify .LLM.classify, /classify..$"),
        ("--api-server-count=4", "has one value here, 1: one process answers HTTP .* behind a load balancer.$"),
    ],
)
def test_flags_that_are_refused(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotYetSupportedError, match=message):
        parse(*line.split())
    assert main(["serve", *line.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {line.replace('=', ' ').split()[0].partition('.')[0][:5]}")


def test_options_in_python(caplog: pytest.LogCaptureFixture) -> None:
    nothing = {"runner": "generate", "task": None, "enable_dbo": False, "enable_sleep_mode": True, "cpu_offload_gb": 0}
    empty: dict[str, Any] = {"logits_processors": [], "kv_transfer_config": {}}
    assert engine_args(compilation_config={"mode": 3}, **nothing, **empty) == EngineArgs()
    with pytest.raises(NotYetSupportedError, match="^logits_processors is not supported"):
        engine_args(logits_processors=["my.Processor"])
    assert engine_args(optimization_level=0) == EngineArgs()
    compiled = "no model is compiled; kernels are there already, or on a GPU are compiled at the first start."
    names = ["compilation_config", "optimization_level"]
    assert caplog.messages == [f"{name} has no effect: {compiled}" for name in names]


# ---- --config


@pytest.fixture
def serve_parser() -> Parser:
    (action,) = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    parser = action.choices["serve"]
    assert isinstance(parser, Parser)
    return parser


def test_a_file_of_flags(serve_parser: Parser, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: some/model\nport: 9000\ntensor_parallel_size: 2\nenable-prefix-caching: false\napi-key: [a, b]\n"
        "speculative-config:\n  method: ngram\n  num_speculative_tokens: 3\nrevision:\nkeep-alive: -1\nrunner: auto\n"
        "hf-overrides:\n  released: 2024-01-31\n"
    )
    read = vars(serve_parser.read_file(str(file)))
    assert read | {"run": 0, "parser": 0, "model_argument": 0} == {
        "hf_overrides": {"released": "2024-01-31"},
        "model": "some/model", "port": 9000, "tensor_parallel_size": 2, "enable_prefix_caching": False,
        "api_key": ["a", "b"], "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "keep_alive": -1.0, "run": 0, "parser": 0, "model_argument": 0,
    }  # fmt: skip


def test_a_file_of_a_scripts_flags(tmp_path: Path) -> None:
    """Those given beside it go first, wherever they stand, and the file need not have the ones that must be given."""
    file = tmp_path / "config.yaml"
    file.write_text("max_tokens: 5\nmodel: a\n")
    parser = Parser()
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--model", default="b")
    parser.add_argument("--text", required=True)
    read = parser.parse_args(["--model", "c", "--config", str(file), "--text", "d"])
    assert vars(read) == {"max_tokens": 5, "model": "c", "text": "d"}
    parser.add_argument("--config")
    assert parser.parse_args(["--config", str(file), "--text", "d"]).config == str(file), "the script's own"


def test_a_list_of_objects_in_a_file(serve_parser: Parser, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("lora-modules:\n- {name: a, path: /a}\n- {name: b, path: /b}\nallowed-origins: [x]\napi-key: []\n")
    read = vars(serve_parser.read_file(str(file)))
    assert read["lora_modules"] == ['{"name": "a", "path": "/a"}', '{"name": "b", "path": "/b"}']
    assert read["allowed_origins"] == ["x"]
    assert "api_key" not in read


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", " must hold keys and values, as 'port: 8000'."),
        ("a: [", r" can't be read: while parsing a flow node .* line 1, column 5.*\.$"),
        ("enable-eplb: true", ": --enable-eplb is not supported yet: experts stay on their ranks. Leave it out."),
    ],
)
def test_files_that_are_refused(text: str, message: str, serve_parser: Parser, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises((ConfigError, NotYetSupportedError), match=f"^{file}{message}"):
        serve_parser.read_file(str(file))


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="the system has no such device")
def test_a_file_without_an_end_is_refused(serve_parser: Parser) -> None:
    with pytest.raises(ConfigError, match="^--config /dev/zero does not end within 1048576 characters.$"):
        serve_parser.read_file("/dev/zero")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-modl-len: 4", "unknown argument --max-modl-len. Did you mean --max-model-len?"),
        ("port: many", "argument --port: 'many' is not a whole number"),
    ],
)
def test_keys_that_are_wrong(
    text: str, message: str, serve_parser: Parser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as stop:
        serve_parser.read_file(str(file))
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {file}: {message}")


def test_a_short_file_takes_no_long_buffer(tmp_path: Path) -> None:
    (file := tmp_path / "short.txt").write_text("a: 1\n")
    tracemalloc.start()
    try:
        assert read_text(str(file)) == "a: 1\n"
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()
