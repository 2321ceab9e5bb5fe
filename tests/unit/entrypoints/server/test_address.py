"""The address that a server listens on, beyond what test_launch shows of it."""

import asyncio
import socket

import pytest

from quire.entrypoints.server.address import bound_socket
from quire.entrypoints.server.options import ServerArgs
from quire.errors import ConfigError


def test_events_are_sent_at_once() -> None:
    """Nagle's algorithm is off: on a connection used before, a stream's events would come together, 40 ms late."""

    async def option_of_a_connection(listener: socket.socket) -> int:
        accepted = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(lambda _, writer: accepted.set_result(writer), sock=listener)
        async with server:
            _, client = await asyncio.open_connection(*listener.getsockname())
            writer = await accepted
            option = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for one in (client, writer):
                one.close()
        return option

    with bound_socket(ServerArgs(host="127.0.0.1", port=0)) as listener:
        assert asyncio.run(option_of_a_connection(listener)) != 0


@pytest.mark.parametrize("host", ["a" * 64, "\udcff", "a..b"])
def test_a_host_that_can_be_no_name(host: str) -> None:
    with pytest.raises(ConfigError, match="is not known"), bound_socket(ServerArgs(host=host)):
        pass


def test_an_empty_path_is_none() -> None:
    with bound_socket(ServerArgs(host="127.0.0.1", port=0, uds="")) as listener:
        assert listener.family == socket.AF_INET
