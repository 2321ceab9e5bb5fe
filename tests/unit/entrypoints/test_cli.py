"""The command line against a fake `LLM`: flags, streams, files, exit codes; nothing here imports torch."""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.entrypoints.cli.flags import documentation, engine_args_from, human_int
from quire.entrypoints.cli.main import build_parser, main
from quire.errors import ModelLoadError
from quire.sampling_params import RequestOutputKind

ROOT = Path(__file__).parents[3]


def parse(*arguments: str) -> EngineArgs:
    return engine_args_from(build_parser().parse_args(["generate", *arguments]))


# ---- help and flags


def test_a_models_page_is_its_hub_id() -> None:
    assert parse("https://huggingface.co/Owner/Name").model == "Owner/Name"
    assert parse("hf.co/Owner/Name:Q4_K_M").model == "Owner/Name:Q4_K_M"


def test_help_lists_what_there_is_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom quire.entrypoints.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as e:\n    assert e.code == 0\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'fastapi', 'numpy', 'huggingface_hub', 'jinja2', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    *help_text, heavy = done.stdout.splitlines()
    assert heavy == "[]"
    listed = {line.split()[0] for line in help_text if line.startswith("    ")}
    work = {"serve", "generate", "chat", "complete", "run-batch", "bench"}
    assert listed == work | {"plan", "quantize", "models", "pull", "rm", "show", "cache", "collect-env", "version"}


@pytest.mark.parametrize("command", [["generate"], ["chat"], ["bench", "latency"], ["bench", "throughput"]])
def test_every_engine_option_is_a_flag(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(EngineArgs):
        assert "--" + field.name.replace("_", "-") in shown
        assert " ".join(documentation(EngineArgs)[field.name].split()[:3]) in shown


@pytest.mark.parametrize(
    ("wanted", "shown"),
    [
        ("max-model-len", {"--max-model-len"}),
        ("--Max_Model_Len", {"--max-model-len"}),
        ("kv-cache-dir", {"--kv-cache-dir", "--kv-cache-dir-size"}),
        ("threads", {"-t", "--threads"}),
    ],
)
def test_help_shows_a_part(wanted: str, shown: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", f"--help={wanted}"])
    assert stop.value.code == 0
    assert set(re.findall(r"^  (-\S+)(?:, | )", told := capsys.readouterr().out, re.MULTILINE)) == {*shown} - {
        "--threads"
    }
    assert "options:" in told


def test_help_shows_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    shown: dict[str, str] = {}
    for wanted in ("listgroup", "server", "engine options", "all"):
        with pytest.raises(SystemExit) as stop:
            main(["serve", f"--help={wanted}"])
        assert stop.value.code == 0
        shown[wanted] = capsys.readouterr().out
    assert shown["listgroup"].split("\n")[-3:] == ["server options", "engine options", ""]
    assert "--port" in shown["server"]
    assert "--block-size" not in shown["server"]
    assert "--block-size" in shown["engine options"]
    assert shown["engine options"] in shown["all"]
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--help=blocksize"])
    assert stop.value.code == 2
    assert "no flag has that in its name; groups are positional arguments, options" in capsys.readouterr().err


HOMELESS = "'~/x' is in a home that nobody has; give the whole path\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "~/model"], "Model directory '~/model' does not exist; check the path."),
        (["cache", "--kv-cache-dir", "~/x"], "argument --kv-cache-dir: " + HOMELESS + "See 'quire cache --help'."),
        (["quantize", "demo", "~/x", "--method", "int8"], "argument OUT: " + HOMELESS + "See 'quire quantize --help'."),
        (
            ["quantize", "demo", "x", "--calibration", "~/x", "--method", "int8"],
            "argument --calibration: " + HOMELESS + "See 'quire quantize --help'.",
        ),
    ],
)
def test_a_home_that_nobody_has_is_a_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As without HOME and without an entry among the system's users."""
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    if HOMELESS in message:  # the parser's words
        with pytest.raises(SystemExit, match="^2$"):
            main(arguments)
    else:
        assert main(arguments) == 1
    assert capsys.readouterr().err == f"error: {message}\n"


def test_python_dash_m() -> None:
    done = subprocess.run([sys.executable, "-m", "quire", "version"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "quire 0.1.0\n", "")


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("-1", -1), ("4096", 4096), ("4k", 4000), ("4K", 4096), ("1M", 2**20), ("1m", 10**6), ("2.5k", 2500)],
)
def test_human_int(text: str, value: int) -> None:
    assert human_int(text) == value


@pytest.mark.parametrize("text", ["", "k", "4q", "1.5", "1.5K", "1.0001k", "0x10", "four", "4 k", "1e3"])
def test_human_int_refuses(text: str) -> None:
    with pytest.raises(Exception, match="not a whole number"):
        human_int(text)


def test_flags_left_out_are_the_defaults() -> None:
    assert parse() == EngineArgs()


def test_engine_flags_reach_the_options() -> None:
    args = parse(
        "some/model", "--max-model-len", "4k", "--max_num_seqs=8", "--no-enable-prefix-caching", "--kv_cache_memory",
        "1G", "--scheduling-policy", "priority", "--gpu-memory-utilization", "0.5", "--hf-overrides", '{"a_b": [1]}',
    )  # fmt: skip
    assert args == EngineArgs(
        model="some/model", max_model_len=4000, max_num_seqs=8, enable_prefix_caching=False, kv_cache_memory=2**30,
        scheduling_policy="priority", gpu_memory_utilization=0.5, hf_overrides={"a_b": [1]},
    )  # fmt: skip


def test_flags_of_other_names() -> None:
    args = parse("-q", "int8", "-tp", "1", "-pp", "1", "--num-gpu-blocks-override", "64", "--kv_cache_memory_bytes=1G")
    assert args == EngineArgs(quantization="int8", num_kv_blocks=64, kv_cache_memory=2**30)


def test_both_ways_to_name_the_model() -> None:
    assert parse("m") == parse("--model", "m") == parse("m", "--model", "m")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["help"], "usage: quire [-h]"),
        (["help", "bench", "step"], "usage: quire bench step"),
        (["-v"], "quire "),
    ],
)
def test_help_is_a_command_too(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(told)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--max-modl-len", "4"], "unknown argument --max-modl-len. Did you mean --max-model-len?"),
        (["generate", "--max_modl_len=4"], "Did you mean --max-model-len?"),
        (["chat", "--temprature=1"], "unknown argument --temprature. Did you mean --temperature?"),
        (["bench", "latency", "--batchsize", "3"], "Did you mean --batch-size?"),
        (["generate", "--xyzzy"], "unknown argument --xyzzy."),
        (["generate", "a", "b"], "unknown argument b."),
        (["generate", "--max-model-len", "long"], "not a whole number"),
        (["generate", "--max-model"], "unknown argument --max-model."),
        (["generate", "--hf-overrides", "{"], "not valid JSON"),
        (["generate", "--hf-overrides", 10_000 * "["], "not valid JSON"),
        (["serve", "--allowed-origins", 10_000 * "["], "not valid JSON"),
        (["generate", "--hf-overrides", "[1]"], "must be a JSON object"),
        (["generate", "--scheduling-policy", "lifo"], "invalid choice"),
        (["generate", "--quantization", "int3"], "invalid choice: 'int3' (choose from"),
        (["bench", "latency", "--batch-size", "0"], "must be at least 1"),
        (["serv"], "invalid choice: 'serv'"),
        (["srve"], "COMMAND: invalid choice: 'srve'. Did you mean serve?"),
        (["xyzzy"], "invalid choice: 'xyzzy'. There are serve, generate,"),
        (["bench", "latncy"], "WHAT: invalid choice: 'latncy'. Did you mean latency?"),
        (["bench"], "required: WHAT"),
        (["serve", "--override-generation-config", "1"], "must be a JSON object"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert "usage:" not in captured.err
    assert captured.out == ""


def test_an_interrupt_during_imports_is_quiet() -> None:
    code = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'quire.entrypoints.cli.main':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from quire.__main__ import main\n"
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "generate" in capsys.readouterr().err


# ---- generate


def test_one_prompt_streams_its_text_alone(fake_llm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "demo", "--prompt", "Once --a_b=c", "--temperature", "0", "--max-tokens", "5"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Once more é.\n"
    assert "2 tokens in and 3 out" in captured.err
    ((prompt, params),) = fake_llm.made[0].llm_engine.requests
    assert prompt == "Once --a_b=c"
    assert (params.temperature, params.max_tokens, params.output_kind) == (0.0, 5, RequestOutputKind.DELTA)
    assert fake_llm.made[0].llm_engine.aborted == []


def test_several_prompts(fake_llm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--prompt", "one", "--prompt", "two", "--n", "2", "--max-tokens", "4"]) == 0
    out = capsys.readouterr().out
    places = [out.index(t) for t in ("[1/2] one", "text 0.0", "text 0.1", "[2/2] two", "text 1.0", "text 1.1")]
    assert places == sorted(places)
    assert out.splitlines()[-1].startswith("2 prompts, 6 tokens in and 16 out in ")
    prompts, params = fake_llm.made[0].calls[0]
    assert (prompts, params.n) == (["one", "two"], 2)


def test_sampling_flags_go_over_the_models_defaults(fake_llm: Any) -> None:
    fake_llm.defaults = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 77}
    assert main(["generate", "--prompt", "x", "--top_p", "0.5", "--stop", "a", "--stop", "b", "--ignore-eos"]) == 0
    ((_, params),) = fake_llm.made[0].llm_engine.requests
    assert (params.temperature, params.top_p, params.max_tokens) == (0.6, 0.5, 77)
    assert (params.stop, params.ignore_eos) == (["a", "b"], True)


def test_seed_is_the_engines(fake_llm: Any) -> None:
    assert main(["generate", "--prompt", "x", "--seed", "11"]) == 0
    ((_, params),) = fake_llm.made[0].llm_engine.requests
    assert (fake_llm.made[0].args.seed, params.seed, params.max_tokens) == (11, None, 128)


def test_prompts_from_a_file_and_from_standard_input(
    fake_llm: Any, tmp_path: Path, give_input: Callable[[str], None]
) -> None:
    (tmp_path / "prompts").write_text("first\n\nsecönd\n", encoding="utf-8")
    assert main(["generate", "--prompts-file", str(tmp_path / "prompts"), "--prompt", "zero"]) == 0
    give_input("a\nb\n")
    assert main(["generate", "--prompts-file", "-"]) == 0
    give_input("one prompt\nof two lines\n")
    assert main(["generate"]) == 0
    assert fake_llm.made[0].calls[0][0] == ["zero", "first", "secönd"]
    assert fake_llm.made[1].calls[0][0] == ["a", "b"]
    assert fake_llm.made[2].llm_engine.requests[0][0] == "one prompt\nof two lines"


def test_no_prompt_is_refused_before_any_model_is_loaded(
    fake_llm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], give_input: Callable[[str], None]
) -> None:
    (tmp_path / "latin").write_bytes(b"\xe9\n")
    for arguments, message in (
        ([], "no prompt: give --prompt"),
        (["--prompts-file", str(tmp_path / "gone")], "No such file"),
        (["--prompts-file", str(tmp_path / "latin")], "UTF-8"),
    ):
        give_input("")
        assert main(["generate", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert fake_llm.made == []


# ---- errors


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--max-num-seqs", "0"], 2, "error: max_num_seqs must be an integer, from 1 to 100000, got 0.\n"),
        (
            ["--gpu-memory-utilization", "2"],
            2,
            "error: gpu_memory_utilization/device_memory_utilization must be a number, over 0, at most 1, got",
        ),
        (["--temperature", "3"], 2, "error: temperature must be a number in [0, 2]; it is 3.0.\n"),
        (["--n", "0"], 2, "error: n must be an integer in [1, 16384]; it is 0.\n"),
    ],
)
def test_an_error_is_one_line(
    fake_llm: Any, arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--prompt", "x", *arguments]) == code
    err = capsys.readouterr().err
    assert err.startswith(message)
    assert err.count("\n") == 1
    assert fake_llm.made == []  # no time was spent on a model


def test_a_refused_prompt(fake_llm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fake_llm.refuse = lambda prompt: True
    assert main(["generate", "--prompt", "x"]) == 2
    assert capsys.readouterr().err == "error: prompt is refused.\n"


@pytest.mark.parametrize(("failure", "code"), [(ModelLoadError("no weights here."), 1), (KeyboardInterrupt(), 130)])
def test_exit_codes_of_failures(
    fake_llm: Any, failure: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_llm.failure = failure
    assert main(["generate", "--prompt", "x"]) == code
    assert capsys.readouterr().err == ("error: no weights here.\n" if code == 1 else "")


def test_a_bug_keeps_its_traceback(fake_llm: Any) -> None:
    fake_llm.failure = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        main(["generate", "--prompt", "x"])


def test_a_reader_that_goes_away_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "quire", "version"]
    done = subprocess.run(command, cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(("buffered", "command"), [(True, "version"), (False, "version"), (True, "--help")])
def test_an_output_that_cannot_be_written(buffered: bool, command: str) -> None:
    """One line and an exit code, and no traceback, at the interpreter's end neither."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    run = [sys.executable, *([] if buffered else ["-u"]), "-m", "quire", command]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(run, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert (done.returncode, done.stderr) == (1, "error: the output can't be written: No space left on device.\n")


def test_a_log_that_cannot_be_written_is_no_failure() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    script = (
        "import sys; from quire.entrypoints.cli import main; "
        "main._check_command = lambda *_: sys.stderr.write('x'); sys.exit(main.main(['version']))"
    )
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=full, env=environment)
    assert (done.returncode, done.stdout[:5]) == (0, b"quire")


@pytest.mark.parametrize(
    ("command", "shell", "message"),
    [
        ("generate", "<&-", "no prompt: give --prompt TEXT or --prompts-file FILE, or pipe a prompt in."),
        ("complete --url {url}", "<&-", "no prompt: give --quick TEXT, or pipe one in."),
        (
            "run-batch -i - -o - --max-num-seqs 0",
            "<&- >&-",
            "max_num_seqs must be an integer, from 1 to 100000, got 0.",
        ),
        ("generate", "< {bytes}", "standard input is not UTF-8 text."),
        ("complete --url {url}", "< {bytes}", "standard input is not UTF-8 text."),
        ("chat --url {url}", "< {bytes}", "standard input is not UTF-8 text."),
    ],
)
@pytest.mark.parametrize("locale", ["C", pytest.param("C.UTF-8", marks=pytest.mark.slow)])
def test_standard_input_that_is_closed_or_no_text(
    command: str, shell: str, message: str, locale: str, server: Any, tmp_path: Path
) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\n")
    places = {"url": server.url, "bytes": tmp_path / "bytes"}
    line = f"{sys.executable} -m quire {command} {shell}".format_map(places)
    environment = os.environ | {"LC_ALL": locale}
    done = subprocess.run(["sh", "-c", line], cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment)
    assert (done.returncode, done.stderr) == (2, f"error: {message}\n")
    assert server.bodies("/v1/completions") == server.bodies("/v1/chat/completions") == []
