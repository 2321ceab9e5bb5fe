"""KV events from a running engine: a subscriber knows which prefixes it holds."""

import time
from pathlib import Path

import msgspec
import zmq

from quire import LLM, SamplingParams
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
