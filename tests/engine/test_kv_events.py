"""KV events from a running engine: a subscriber knows which prefixes it holds."""

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quire import LLM, EngineArgs, SamplingParams
from quire.engine.build import build_core
from quire.errors import ConfigError, ModelLoadError
from quire.protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch


def test_a_subscriber_knows_what_the_engine_holds(tmp_path: Path) -> None:
    address, replay = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
    options = {"enable_kv_cache_events": True, "endpoint": address, "replay_endpoint": replay}
    llm = LLM("demo", show_progress=False, num_kv_blocks=12, max_model_len=128, block_size=16, kv_events_config=options)
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    for number in range(4):
        llm.generate({"prompt_token_ids": [number] * 70}, params, use_tqdm=False)
    assert llm.reset_prefix_cache()
    llm.generate({"prompt_token_ids": [9] * 40}, params, use_tqdm=False)
    pool = llm.llm_engine.core.scheduler.kv._groups[0].pool
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(replay)
        deadline = time.monotonic() + 30
        known: dict[bytes, list[int]] = {}
        num_cleared = 0
        while known.keys() != pool._block_of.keys():
            assert time.monotonic() < deadline, "the subscriber has missed something"
            socket.send_multipart([b"", (0).to_bytes(8, "big")])
            num_cleared = 0
            while (frames := socket.recv_multipart())[2]:
                for event in msgspec.msgpack.decode(frames[2], type=KVEventBatch).events:
                    if isinstance(event, BlockStored):
                        size = event.block_size
                        tokens = [event.token_ids[i : i + size] for i in range(0, len(event.token_ids), size)]
                        known |= zip(event.block_hashes, tokens, strict=True)
                    elif isinstance(event, BlockRemoved):
                        for name in event.block_hashes:
                            del known[name]
                    else:
                        assert event == AllBlocksCleared()
                        num_cleared += 1
                        known.clear()
    assert num_cleared == 1
    assert list(known.values()) == [[9] * 16] * 2
    llm.llm_engine.shutdown()


class Unloadable:
    """An executor whose model is broken."""

    max_in_flight = 1

    def start(self, **_: Any) -> None:
        raise ModelLoadError("broken")


def test_addresses_are_taken_before_the_model_loads() -> None:
    """And given back where it can't be."""
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        options = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{port}"}
        config = EngineArgs(model="demo", kv_events_config=options).resolve()
        executor: Any = Unloadable()
        with pytest.raises(
            ConfigError, match="^kv_events_config: no events can be published at .*: Address already in"
        ):
            build_core(config, False, executor)
    for _ in range(2):
        with pytest.raises(ModelLoadError):
            build_core(config, False, executor)
