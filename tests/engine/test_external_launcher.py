"""Ranks that torchrun started: each has an LLM of its own, and all give the answers of one process."""

import gc
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

import quire
from quire import LLM, AsyncLLM, EngineArgs
from quire.errors import ConfigError
from quire.executor.external import _store

LAUNCHER: dict[str, Any] = {"distributed_executor_backend": "external_launcher"}
SCRIPT = """
import json, os, sys
from quire import LLM, SamplingParams
options = json.loads(sys.argv[1])
rank = os.environ.get("RANK", "0")
def engine():
    return LLM("demo", show_progress=False, max_model_len=256, **options)
prompts = ["Once upon a time", "The ship had been at sea for", "Once upon a time there was", "A"]
params = [
    SamplingParams(max_tokens=20, temperature=0.8 * (i % 2), logprobs=2, n=1 + i % 2, ignore_eos=True) for i in range(4)
]
params.append(SamplingParams(max_tokens=30, structured_outputs={"regex": "[a-z]{2,6}( [a-z]{2,6}){3,5}"}, logprobs=1))
def run(llm):
    outputs = llm.generate([*prompts, "Say"], params, use_tqdm=False)
    return [[(list(c.token_ids), [{t: x.logprob for t, x in step.items()} for step in c.logprobs]) for c in out.outputs]
            for out in outputs]
llm = engine()
found = [run(llm)]
if sys.argv[3:] == ["differs"] and rank == "1":
    prompts[0] = "Twice upon a time"
if sys.argv[3:] == ["dies"]:
    print("ready", flush=True)
    while True:
        if rank == "1":
            os.kill(os.getpid(), 9)
        run(llm)
found += [run(llm), run(engine())]  # prefix hits, and a second engine
with open(sys.argv[2] + rank, "w") as file:
    json.dump(found, file)
"""


def launch(
    home: Path, options: dict[str, Any], *words: str, num_ranks: int = 2, script: str = SCRIPT, restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    (home / "script.py").write_text(script)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    launcher += ["--max-restarts", str(restarts)]
    program = [str(home / "script.py"), json.dumps(options), str(home / "found"), *words]
    command = [sys.executable, *(launcher if num_ranks else []), *program]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        {"scheduling_policy": "priority"},
        {"dtype": "bfloat16", "max_num_batched_tokens": 24, "num_kv_blocks": 40, "scheduling_policy": "shortest"},
        {"quantization": "int8", "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"speculative_config": {"model": "demo-draft", "num_speculative_tokens": 3}, "swap_space": 0.01},
    ],
)
def test_every_rank_answers_as_one_process(tmp_path: Path, options: dict[str, Any]) -> None:
    assert launch(tmp_path, options, num_ranks=0).returncode == 0
    expected = json.loads((tmp_path / "found0").read_text())
    ended = launch(tmp_path, options | {"tensor_parallel_size": 2} | LAUNCHER)
    assert ended.returncode == 0, ended.stderr
    assert [json.loads((tmp_path / f"found{rank}").read_text()) for rank in range(2)] == [expected, expected]


@pytest.mark.nightly
def test_ranks_that_ask_for_other_things_are_told(tmp_path: Path) -> None:
    ended = launch(tmp_path, {"tensor_parallel_size": 2} | LAUNCHER, "differs")
    assert ended.returncode != 0
    assert "rank 1 of 2 planned another step than rank 0; all ranks must run the same program" in ended.stderr


OTHERWISE = {  # what rank 1 does -> what both are told
    "quire.executor.external.__version__ = '0.0.7'": r"Quire 0\.0\.7 \(rank 0: Quire \d",
    "options['quantization'] = 'int8'": r"quantization='int8' \(rank 0: quantization=None\)",
    "model = sys.argv[3]": r"model=ModelConfig\(model='/.* \(rank 0: model=ModelConfig\(model='demo'",
}


@pytest.mark.nightly
@pytest.mark.parametrize("change", OTHERWISE)
def test_ranks_that_run_something_else_are_told(tmp_path: Path, change: str) -> None:
    other = shutil.copytree(Path(quire.__file__).parent / "demo", tmp_path / "oth")
    first = f"import quire.executor.external\nmodel = 'demo'\nif rank == '1': {change}\n"
    script = SCRIPT.replace("def engine():", first + "def engine():").replace('LLM("demo"', "LLM(model")
    ended = launch(tmp_path, {"tensor_parallel_size": 2} | LAUNCHER, str(other), script=script)
    assert ended.returncode != 0
    assert re.search(f"rank 1 runs something else than rank 0: .*{OTHERWISE[change]}", ended.stderr), ended.stderr
    assert "Start all ranks alike." in ended.stderr


@pytest.mark.nightly
def test_ranks_that_torchrun_starts_again_find_each_other(tmp_path: Path) -> None:
    """Its store still has what those of the first start said, of whom rank 1 ended before it came."""
    first = "if rank == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
    first += "    while not os.path.exists(sys.argv[3]): pass\n    sys.exit(1)\n"
    tell = "import quire.executor.external as e\ne._TOLD = e.timedelta(seconds=0.1)\n"
    tell += "e.logger.warning = lambda *_: open(sys.argv[3], 'w').close()\n"  # rank 0 has come, and waits
    script = SCRIPT.replace("def engine():", tell + first + "def engine():", 1)
    ended = launch(tmp_path, {"tensor_parallel_size": 2} | LAUNCHER, str(tmp_path / "waits"), script=script, restarts=1)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "found0").read_text() == (tmp_path / "found1").read_text()


@pytest.mark.nightly
def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    """Under a launcher that does not look after them, too."""
    (tmp_path / "script.py").write_text(SCRIPT)
    options = json.dumps({"tensor_parallel_size": 2} | LAUNCHER)
    common = os.environ | {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29417",
    }
    command = [sys.executable, str(tmp_path / "script.py"), options, str(tmp_path / "found"), "dies"]
    ranks = [
        subprocess.Popen(command, env=common | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert ranks[1].wait(100) == -signal.SIGKILL
    start = time.monotonic()
    _, told = ranks[0].communicate(timeout=20)
    assert time.monotonic() - start < 10
    assert "rank 0 of 2 stops: another rank of its group failed" in told
    ranks[1].communicate()


def test_bad_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs RANK, .* start the program with torchrun --nproc-per-node 2"):
        LLM("demo", tensor_parallel_size=2, **LAUNCHER)
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="WORLD_SIZE is 3, but tensor_parallel_size=2"):
        LLM("demo", tensor_parallel_size=2, **LAUNCHER)
    with pytest.raises(ConfigError, match="is for LLM, under torchrun"):
        AsyncLLM.from_engine_args(EngineArgs("demo", **LAUNCHER))


@pytest.mark.slow
def test_who_does_not_come_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("quire.executor.external._TOLD", timedelta(seconds=0.1))
    monkeypatch.setattr("quire.executor.external._MEET", timedelta(seconds=0.3))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}, or that port is in use; .* start all ranks anew"):
            LLM("demo", tensor_parallel_size=2, **LAUNCHER)
    with pytest.raises(ConfigError, match="rank 1 of 2 has not come within"):
        LLM("demo", tensor_parallel_size=2, **LAUNCHER)
    assert "rank 0 waits for rank 1, which has not come yet" in caplog.text
    gc.collect()  # rank 0's store, which the error's frames had
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match=f"rank 0 is not at MASTER_ADDR:MASTER_PORT, 127.0.0.1:{port}"):
        LLM("demo", tensor_parallel_size=2, **LAUNCHER)


@pytest.mark.slow
def test_who_waits_for_others_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr("quire.executor.external._TOLD", timedelta(seconds=0.5))
    monkeypatch.setattr("quire.executor.external._MEET", timedelta(seconds=20))
    threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        LLM("demo", tensor_parallel_size=2, **LAUNCHER)
    assert time.monotonic() - start < 10


def test_a_store_of_our_own_is_on_no_other_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the port taken from a second engine of this process."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for host, elsewhere in (("127.0.0.1", "127.0.0.2"), ("::1", "127.0.0.1"), ("localhost", "127.0.0.2")):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        first, second = (_store(0, host, str(port)) for _ in range(2))
        first.set("key", "value")
        assert second.get("key") == b"value"
        assert _store(1, host, str(port)).get("key") == b"value"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((elsewhere, port)).close()


def test_who_comes_and_goes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.executor.external._MEET", timedelta(seconds=0.3))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    store.set("0/quire1/place0", f"{os.getpid()} {machine} {os.readlink('/proc/self/ns/pid')}")
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="one of the 2 ranks has come, and is gone"):
        LLM("demo", tensor_parallel_size=2, **LAUNCHER)
