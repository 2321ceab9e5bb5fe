"""`quire serve`: flags become options; and the whole thing once, as a process of its own."""

import dataclasses
import os
import signal
import subprocess
import sys
import types
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.entrypoints.cli.main import main
from quire.entrypoints.server.options import ServerArgs
from quire.utils.hub import resolve_model_path

ROOT = Path(__file__).parents[4]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ServerArgs, EngineArgs]]:
    """What `launch.serve` was called with."""
    calls: list[tuple[ServerArgs, EngineArgs]] = []
    module = types.ModuleType("quire.entrypoints.server.launch")
    module.serve = lambda *given: calls.append(given)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quire.entrypoints.server.launch", module)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name in ("QUIRE_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_nothing_else_is_needed(served: list[Any]) -> None:
    assert main(["serve"]) == main(["serve", "demo"]) == 0
    assert served == [(ServerArgs(), EngineArgs())] * 2


def test_flags_of_both_kinds(served: list[Any]) -> None:
    line = (
        "serve some/model --host ::1 --port 9000 --api-key one two --api-key three --served_model_name a "
        '--allowed-origins ["http://x","http://y"] --allowed-methods GET POST --max-body-bytes 1M --ssl-cert-reqs 0 '
        "--shutdown-timeout 2.5 --engine thread --max-num-seqs 8 --disable-log-requests"
    )
    assert main(line.split()) == 0
    args = ServerArgs(
        host="::1", port=9000, api_key=["one", "two", "three"], served_model_name=["a"], max_body_bytes=2**20,
        allowed_origins=["http://x", "http://y"], allowed_methods=["GET", "POST"], shutdown_timeout=2.5,
        engine="thread", disable_log_requests=True,
    )  # fmt: skip
    assert served == [(args, EngineArgs(model="some/model", max_num_seqs=8))]


def test_an_empty_list(served: list[Any]) -> None:
    assert main(["serve", "--allowed-origins", "[]"]) == 0
    assert served[0][0].allowed_origins == []


def test_a_file_of_flags(served: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model: some/model\nport: 9000\napi-key: [a]\nmax_num_seqs: 8\n")
    assert main(["serve", "--config", str(file)]) == 0
    assert main(["serve", "other/model", "--api-key", "b", "--config", str(file), "--port=8000"]) == 0
    assert served == [
        (ServerArgs(port=9000, api_key=["a"]), EngineArgs(model="some/model", max_num_seqs=8)),
        (ServerArgs(port=8000, api_key=["b"]), EngineArgs(model="other/model", max_num_seqs=8)),
    ]
    assert main(["serve", "--config", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"error: --config {tmp_path}/none: No such file or directory.\n"


def test_threads(served: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As OMP_NUM_THREADS has it, for this process and those that it starts."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert main(["serve"]) == 0
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert main(["serve", "-t", "3"]) == 0
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_a_key_from_the_environment(served: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "sesame")
    assert main(["serve"]) == main(["serve", "--api-key", "other"]) == 0
    assert [args.api_key for args, _ in served] == [["sesame"], ["other"]]


def test_vllms_variables(served: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A server that had a key has one here; what is not read is said."""
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    assert main(["serve"]) == 0
    assert not caplog.messages
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    monkeypatch.setenv("QUIRE_API_KEY", "own")
    assert main(["serve"]) == 0
    assert [args.api_key for args, _ in served] == [["sesame"], ["own"]]
    told = "VLLM_ALLOW_LONG_MAX_MODEL_LEN, VLLM_CPU_KVCACHE_SPACE in the environment: no effect here"
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(told)


def test_a_model_taken_for_a_value_is_refused(
    served: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flags that take several values are as greedy as vLLM's; there no bundled model would be served instead."""
    assert main(["serve", "--api-key", "SECRET", str(tmp_path)]) == 2
    assert f"--api-key took '{tmp_path}', which looks like the model: give the model before --api-key." in (
        capsys.readouterr().err
    )
    assert main(["serve", "--served-model-name", "m", "owner/llama"]) == 2
    assert "--served-model-name took 'owner/llama', which looks like the model" in capsys.readouterr().err
    assert main(["serve", "--api-key", "SECRET", "not/a/path"]) == 2
    assert "not/a/path" not in capsys.readouterr().err, "it may be a key"
    assert served == []
    assert main(["serve", str(tmp_path), "--api-key", "SECRET", "a/b"]) == 0
    assert main(["serve", "--served-model-name", "m", "n"]) == 0
    assert main(["serve", "--api-key", "with/slash"]) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--port 99999", "error: port must be an integer, from 0 to 65535, got 99999."),
        ("--port x", "not a whole number"),
        ("--allowed-origins [1]", "must be texts, or a JSON list of them"),
        ("--allowed-origins [", "not valid JSON"),
        ("--ssl-cert-reqs 3", "invalid choice"),
        ("--prot 8000", "Did you mean --port?"),
        ("--max-num-seqs 0", "max_num_seqs must be an integer, from 1 to 100000"),
    ],
)
def test_wrong_usage(served: list[Any], flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["serve", *flags.split()])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert served == []


def test_every_option_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for field in (*dataclasses.fields(ServerArgs), *dataclasses.fields(EngineArgs)):
        assert "--" + field.name.replace("_", "-") in shown


def test_the_web_is_not_imported_for_help_or_a_wrong_option() -> None:
    code = (
        "import sys\nfrom quire.entrypoints.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'tokenizers', 'fastapi', 'uvicorn', 'zmq', 'numpy', 'jinja2', 'pydantic'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    for flags in (["--help"], ["--port", "-1"]):
        command = [sys.executable, "-c", code, "serve", *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]"


# ---- as a process


class Serving:
    """`quire serve demo` in a child process, ready."""

    def __init__(self, *flags: str, shell: str = "") -> None:
        command = [sys.executable, "-m", "quire", "serve", "demo", *flags]
        if shell:
            command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.log: list[str] = []
        for line in self.process.stderr:
            self.log.append(line)
            if "Quire is ready on" in line:
                break

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        _, rest = self.process.communicate(timeout=30)
        return self.process.returncode, rest

    def url(self) -> str:
        return self.log[-1].split("ready on ")[1].split()[0]


def children(process: subprocess.Popen[str]) -> list[int]:
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(word) for word in text.split()]


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "number"), [([], signal.SIGTERM), (["--api-key", "k"], signal.SIGINT)])
def test_it_says_what_to_try_next_and_a_signal_ends_it_in_good_order(flags: list[str], number: int) -> None:
    serving = Serving("--port", "0", "--host", "127.0.0.1", *flags)
    engine = children(serving.process)
    facts = "".join(serving.log)
    for fact in ("loading demo", "model: demo, bfloat16", "KV cache:", "docs: /docs"):
        assert facts.count(fact) == 1
    with urllib.request.urlopen(serving.url() + "/health") as answer:
        assert answer.status == 200
    assert serving.process.stderr is not None
    first, second = (serving.process.stderr.readline() for _ in range(2))
    assert f"'quire chat --url {serving.url()}/v1'" in first
    environment = os.environ | {"QUIRE_API_KEY": "k"}
    done = subprocess.run(second, shell=True, env=environment, capture_output=True, text=True)
    assert '"finish_reason":"length"' in done.stdout.replace(" ", "")
    assert serving.end(number)[0] == 0
    assert [pid for pid in engine if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.slow
def test_without_standard_input_and_output() -> None:
    serving = Serving("--port", "0", "--host", "127.0.0.1", shell="<&- >&-")
    with urllib.request.urlopen(serving.url() + "/version") as answer:
        assert answer.status == 200
    assert serving.end()[0] == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two models, one that can't be read, and what is none."""
    demo = resolve_model_path("demo")
    for name in ("beta", "alpha"):
        (tmp_path / "models" / name).mkdir(parents=True)
        for file in ("config.json", "tokenizer.json", "model.safetensors"):
            (tmp_path / "models" / name / file).symlink_to(demo / file)
    (tmp_path / "models" / "broken").mkdir()
    (tmp_path / "models" / "broken" / "config.json").write_text("{")
    (tmp_path / "models" / "empty").mkdir()
    return tmp_path / "models"


def test_several_models(served: list[Any], folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert main(["serve", "demo", str(folder / "alpha"), "--served-model-name", "d", "a", "--num-kv-blocks", "64"]) == 0
    _, _, catalog = served.pop()
    assert [(model.name, model.args.model) for model in catalog.models] == [("d", "demo"), ("a", str(folder / "alpha"))]
    assert all(model.num_bytes > 2**20 and model.max_model_len == 512 for model in catalog.models)
    assert main(["serve", "--models-dir", str(folder), "--keep-alive", "-1", "--max-loaded-models", "2"]) == 0
    _, _, catalog = served.pop()
    assert [model.name for model in catalog.models] == ["alpha", "beta", "broken"]
    assert "config.json" in catalog.models[2].error
    assert "config.json" in caplog.text
    assert (catalog.limits.keep_alive, catalog.limits.max_loaded) == (-1, 2)
    assert catalog.models[0].args.gpu_memory_utilization == 0.2  # of the CPU's 0.4
    assert main(["serve", "demo", "--keep-alive", "5"]) == 0  # one that goes when it is idle
    assert [model.name for model in served.pop()[2].models] == ["demo"]


def test_links_are_names_of_a_model(served: list[Any], folder: Path) -> None:
    (folder / "small").symlink_to(folder / "alpha")
    assert main(["serve", str(folder / "alpha"), "--models-dir", str(folder)]) == 0
    assert [model.name for model in served.pop()[2].models][1:] == ["alpha", "beta", "broken", "small"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("demo demo", "the model 'demo' is given twice"),
        ("{0}/alpha {0}/../models/alpha", "models/alpha' is given twice"),
        ("alpha --models-dir {0}", "the model 'alpha' is given twice"),
        ("demo {0}/missing", "does not exist"),
        ("demo {0}/broken", "config.json"),
        ("demo {0}/alpha --model demo", "named twice"),
        ("--models-dir {0}/nowhere", "is no folder"),
        (f"--models-dir {{0}}/{'a' * 300}", "is no folder"),
        ("--models-dir {0}/empty", "has no model"),
        ("--models-dir {0}/alpha", "It is a model itself: give it as MODEL"),
        ("--models-dir {0} --served-model-name x", "leave it out"),
        ("demo {0}/alpha --served-model-name x", "1 names for 2 models"),
        ("demo {0}/alpha --data-parallel-size 2", "data_parallel_size=2 is for one model"),
        ("demo {0}/alpha --engine thread", "engine='thread' is for one model"),
        ("demo {0}/alpha --keep-alive -0.5", "keep_alive must be -1"),
        ("demo --keep-alive -2", "at least -1"),
        ("demo --max-loaded-models 0", "max_loaded_models must be an integer, at least 1"),
    ],
)
def test_models_that_can_not_be_served_together(
    served: list[Any], folder: Path, line: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *line.format(folder).split()]) in (1, 2)
    assert told in capsys.readouterr().err
    assert served == []


def test_a_model_that_can_never_fit(
    served: list[Any], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quire.entrypoints.server.catalog.available_memory_bytes", lambda: 2**20)
    plan = types.SimpleNamespace(refusal="the weights take 9.0 MiB, and 1.0 MiB of memory are free.")
    monkeypatch.setattr("quire.entrypoints.cli.plan.make_plan", lambda args: plan)
    assert main(["serve", "demo", str(folder / "alpha")]) == 2
    assert "the model 'demo' can never be loaded here: the weights take 9.0 MiB" in capsys.readouterr().err
    plan.refusal = None  # it was only near
    assert main(["serve", "demo", str(folder / "alpha")]) == 0
    assert len(served) == 1
