"""What a reader hears that comes late: `AsyncLLM` over a core whose news the test makes up."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.engine.async_llm import AsyncLLM, AsyncOptions
from quire.errors import InvalidRequestError, RequestFailedError
from quire.outputs import RequestOutput
from quire.protocol.core import Add, News, Ready
from quire.protocol.requests import Terms
from quire.protocol.stats import EngineStats
from quire.protocol.step import Failure, FailureKind, SequenceOutput
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.text.configured import config_tokenizer

KINDS = [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE]
FAILURES = {
    FailureKind.INTERNAL: RequestFailedError,
    FailureKind.BAD_REQUEST: InvalidRequestError,
}


class Core:
    """Takes requests, and does nothing by itself."""

    def __init__(self) -> None:
        self.request_id = ""
        self._emit: Callable[[Any], None] = lambda event: None

    def attach(self, on_event: Callable[[Any], None]) -> None:
        self._emit = on_event

    def send(self, command: Any) -> None:
        if isinstance(command, Add):
            self.request_id = command.request.request_id

    def seconds_stuck(self) -> float:
        return 0.0

    def close(self) -> None:
        pass

    def bring(self, token_ids: list[int], index: int = 0, **facts: Any) -> None:
        """A step brought this to the request."""
        news = SequenceOutput(self.request_id, index, token_ids, **facts)
        self._emit(News([news], [], 0.0, 0.0, EngineStats()))


def heard(core: Core, params: SamplingParams, happens: Callable[[list[int]], None]) -> tuple[list[RequestOutput], Any]:
    """What a reader takes who looks only when all has happened: its outputs, and the error after them."""
    config = EngineArgs(model="demo", generation_config="vllm").resolve()
    tokenizer = config_tokenizer(config)
    assert tokenizer is not None
    llm = AsyncLLM(config, core, Ready(128, 64, 32), tokenizer, AsyncOptions())

    async def read() -> tuple[list[RequestOutput], Any]:
        outputs: list[RequestOutput] = []
        async with llm.open("Once", params, None, Terms(), None) as stream:
            happens(tokenizer.encode(" upon a time", add_special_tokens=False))
            while not (outputs and outputs[-1].finished):
                try:
                    outputs.append(await asyncio.wait_for(stream.get(), 10))
                except Exception as error:
                    return outputs, error
        return outputs, None

    try:
        return asyncio.run(read())
    finally:
        llm.shutdown()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("failure", FAILURES)
def test_text_is_told_before_the_error_that_came_after_it(kind: RequestOutputKind, failure: FailureKind) -> None:
    core = Core()

    def happens(token_ids: list[int]) -> None:
        core.bring(token_ids)
        core.bring([], finish_reason="error", failure=Failure(failure, "it broke", "n"))

    [output], error = heard(core, SamplingParams(output_kind=kind), happens)
    assert (output.outputs[0].text, output.finished) == (" upon a time", False)
    assert output.outputs[0].finish_reason is output.outputs[0].stop_reason is None
    assert type(error) is FAILURES[failure]


def test_of_several_sequences_the_end_of_one_is_told_before_another_ones_error() -> None:
    core = Core()

    def happens(token_ids: list[int]) -> None:
        core.bring(token_ids[:2], index=0)
        core.bring(token_ids[2:], index=1, finish_reason="length")
        core.bring([], index=0, finish_reason="error", failure=Failure(FailureKind.INTERNAL, "it broke"))

    params = SamplingParams(n=2, temperature=1.0, output_kind=RequestOutputKind.DELTA)
    [output], error = heard(core, params, happens)
    assert [part.finish_reason for part in output.outputs] == [None, "length"]
    assert "".join(part.text for part in output.outputs) == " upon a time"
    assert isinstance(error, RequestFailedError)


def test_without_text_that_waits_there_is_the_error_alone() -> None:
    core = Core()

    def happens(token_ids: list[int]) -> None:
        core.bring([], finish_reason="error", failure=Failure(FailureKind.INTERNAL, "it broke"))

    outputs, error = heard(core, SamplingParams(output_kind=RequestOutputKind.DELTA), happens)
    assert outputs == []
    assert isinstance(error, RequestFailedError)
