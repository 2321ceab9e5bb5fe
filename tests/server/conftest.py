"""Fixtures that give tests a real server (`serving.RunningServer`), and let them import the helpers beside them."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from serving import RunningServer

pytest.importorskip("fastapi")


@pytest.fixture(scope="session")
def server_of(
    tmp_path_factory: pytest.TempPathFactory, _no_cache_of_the_users: None
) -> Iterator[Callable[..., RunningServer]]:
    """The server with the given flags: started once, shared by all tests, and checked when it is stopped at the end.

    A test leaves it as it found it: running, and idle before long.
    """
    servers: dict[tuple[str, ...], RunningServer] = {}

    def get(*flags: str) -> RunningServer:
        if flags not in servers:
            servers[flags] = RunningServer(tmp_path_factory.mktemp("server") / "log", *flags)
        return servers[flags]

    yield get
    _stop_all(list(servers.values()))


@pytest.fixture(scope="session")
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
