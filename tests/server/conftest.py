"""Fixtures that give tests a real server (`serving.RunningServer`), and let them import the helpers beside them."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from serving import RunningServer

pytest.importorskip("fastapi")

_HERE = Path(__file__).parent
_shared: dict[tuple[str, ...], RunningServer] = {}  # by its flags


@pytest.fixture(scope="session")
def server_of(
    tmp_path_factory: pytest.TempPathFactory, _no_cache_of_the_users: None
) -> Iterator[Callable[..., RunningServer]]:
    """The server with the given flags: started once, shared by all tests here, and checked when it is stopped.

    A test leaves it as it found it: running, and idle before long.
    """

    def get(*flags: str) -> RunningServer:
        if flags not in _shared:
            _shared[flags] = RunningServer(tmp_path_factory.mktemp("server") / "log", *flags)
        return _shared[flags]

    yield get
    _stop_shared()  # of a run that was cut short


@pytest.hookimpl(trylast=True)  # what tests made of them is gone then
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Shared servers end with the last test here: idle, each takes a hundredth of a core from all others."""
    if nextitem is None or not nextitem.path.is_relative_to(_HERE):
        _stop_shared()


def _stop_shared() -> None:
    servers = [*_shared.values()]
    _shared.clear()
    _stop_all(servers)


@pytest.fixture(scope="module")
def server(server_of: Callable[..., RunningServer]) -> RunningServer:
    """The server without any flags."""
    return server_of()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    """Starts a server of the test's own: `start_server(*flags, model=..., env=...)`.

    A test that ends it otherwise than by `stop` calls `kill`, or checks its end by itself; what still runs after the
    test is stopped, and checked.
    """
    servers: list[RunningServer] = []

    def start(*flags: str, model: str = "demo", env: dict[str, str] | None = None) -> RunningServer:
        servers.append(RunningServer(tmp_path / f"log{len(servers)}", *flags, model=model, env=env))
        return servers[-1]

    yield start
    _stop_all([server for server in servers if server.process.poll() is None])
    for server in servers:
        server.kill()


def _stop_all(servers: list[RunningServer]) -> None:
    errors: list[Exception | AssertionError] = []
    for server in servers:
        try:
            server.stop()
        except (Exception, AssertionError) as error:
            errors.append(error)
    if errors:
        raise ExceptionGroup("servers that did not stop in good order", errors)
