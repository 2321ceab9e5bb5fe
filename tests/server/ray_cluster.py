"""A Ray cluster of two nodes on this machine, two raylets of two CPUs, started as docs/distributed.md says."""

import os
import subprocess
import sys
from pathlib import Path

ADDRESS = "127.0.0.1:26379"
ENV = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "quire-" * 6, "RAY_ADDRESS": ADDRESS}
_RAY = str(Path(sys.executable).parent / "ray")
_STORE = ("--object-store-memory", "100000000", "--disable-usage-stats", "--node-ip-address", "127.0.0.1")


def start(**env: str) -> None:
    """Start both nodes."""
    for node in range(2):
        start_node(node, **env)


def start_node(node: int, **env: str) -> None:
    """Start a node, the head 0 first; its processes have `env`, and its number as QUIRE_TEST_NODE."""
    join = ("--address", ADDRESS)
    head = ("--head", "--port", ADDRESS.rpartition(":")[2], "--include-dashboard=false")
    given = os.environ | ENV | env | {"QUIRE_TEST_NODE": str(node)}
    given.pop("RAY_ADDRESS")
    command = [_RAY, "start", "--num-cpus", "2", *_STORE, *(join if node else head)]
    subprocess.run(command, check=True, capture_output=True, env=given)


def stop() -> None:
    """End it, whatever state it is in."""
    subprocess.run([_RAY, "stop", "--force"], check=True, capture_output=True)


def raylet(node: int) -> int:
    """Its process."""
    mark = f"QUIRE_TEST_NODE={node}\0".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "comm").read_text() == "raylet\n" and mark in (path / "environ").read_bytes():
                return int(path.name)
        except OSError:
            pass
    raise LookupError(f"node {node} has no raylet")


def ranks() -> list[int]:
    """Processes of this machine in which ranks are: of Ray's, and in no server's session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::Actor"):
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found
