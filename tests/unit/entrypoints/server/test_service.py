"""Outputs of several prompts: those of one wake together, and an error after all that had come."""

import asyncio

import pytest

from quire.engine.output_stream import OutputStream
from quire.entrypoints.server.service import Outputs
from quire.errors import RequestFailedError
from quire.outputs import RequestOutput


class Record:
    """A request of which some text has come."""

    def __init__(self, name: str, finished: bool) -> None:
        self.made = RequestOutput(name, None, [], None, [], finished)

    def output(self) -> RequestOutput:
        return self.made

    def text(self) -> str | None:
        return None


def streams(*finished: bool) -> list[OutputStream]:
    made = [OutputStream() for _ in finished]
    for place, (stream, is_last) in enumerate(zip(made, finished, strict=True)):
        stream.source, stream.is_fresh = Record(str(place), is_last), True
    return made


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_what_others_have_comes_before_an_error(failing: int) -> None:
    made = streams(False, False, True)
    made[failing].is_fresh = False
    made[failing].fail(RequestFailedError("it broke"))

    async def read() -> None:
        outputs = Outputs(made)
        assert [place for place, _ in await outputs.next()] == [place for place in range(3) if place != failing]
        with pytest.raises(RequestFailedError, match="it broke"):
            await outputs.next()

    asyncio.run(read())


def test_what_a_prompt_has_comes_before_its_own_error() -> None:
    made = streams(False, False)
    made[0].fail(RequestFailedError("it broke"))

    async def read() -> None:
        outputs = Outputs(made)
        assert [place for place, _ in await outputs.next()] == [0, 1]
        with pytest.raises(RequestFailedError, match="it broke"):
            await outputs.next()

    asyncio.run(read())


def test_nothing_comes_once_all_have_ended() -> None:
    async def read() -> None:
        outputs = Outputs(streams(True, True))
        assert [place for place, _ in await outputs.next()] == [0, 1]
        assert await outputs.next() == []

    asyncio.run(read())


class Body:
    """An outlet that is always ready."""

    is_ready = True

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)


def test_a_prompt_may_be_told_of_what_was_taken_with_its_end() -> None:
    """The engine's callback comes after a reader that was awake already: it is of no prompt that goes on."""
    made, body = streams(True, False), Body()

    async def read() -> None:
        outputs = Outputs(made)
        assert [place for place, _ in await outputs.next(body)] == [0, 1]
        reader = asyncio.create_task(outputs.next(body, lambda batch: b"%d" % batch[0][0]))
        await asyncio.sleep(0)
        made[0].listener()
        await asyncio.sleep(0)
        assert not reader.done()
        made[1].is_fresh = True
        made[1].listener()
        assert body.written == [b"1"]
        reader.cancel()

    asyncio.run(read())
