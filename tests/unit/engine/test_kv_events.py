"""The publisher of KV events, as a subscriber sees it."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quire.config.kv_events import KVEventsConfig
from quire.config.options import read_options
from quire.engine.kv_events import KVEventPublisher
from quire.errors import ConfigError
from quire.protocol.kv_events import AllBlocksCleared, BlockRemoved, KVEvent, KVEventBatch

TIMEOUT = 20_000  # ms


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def config(tmp_path: Path, **options: Any) -> KVEventsConfig:
    addresses: dict[str, Any] = {"endpoint": f"ipc://{tmp_path}/pub", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    return KVEventsConfig(enable_kv_cache_events=True, **(addresses | options))


def removed(number: int) -> list[KVEvent]:
    return [BlockRemoved([bytes([number])], "GPU")]


def read(frames: list[bytes]) -> tuple[int, list[KVEvent]]:
    """A batch's number and events."""
    batch = msgspec.msgpack.decode(frames[1], type=KVEventBatch)
    assert abs(batch.ts - time.time()) < 60
    return int.from_bytes(frames[0], "big"), batch.events


def subscribe(context: zmq.Context, publisher: KVEventPublisher, address: str, topic: bytes = b"") -> zmq.Socket:
    """A socket that has got its first batch, and all that follow."""
    socket = context.socket(zmq.SUB)
    socket.connect(address)
    socket.subscribe(topic)
    for _ in range(200):  # what is sent before it is connected, it does not get
        publisher.publish([AllBlocksCleared()])
        if socket.poll(100):
            return socket
    raise AssertionError("nothing was published")


def test_batches_come_in_order_and_numbered(tmp_path: Path, context: zmq.Context) -> None:
    options = config(tmp_path, topic="kv")
    publisher = KVEventPublisher(options)
    socket = subscribe(context, publisher, options.endpoint, b"kv")
    for number in range(5):
        publisher.publish(removed(number))
    publisher.close()
    found = []
    while len(found) < 5:
        assert socket.poll(TIMEOUT)
        topic, *frames = socket.recv_multipart()
        assert topic == b"kv"
        number, events = read(frames)
        if events != [AllBlocksCleared()]:
            found.append((number, events))
    assert [events for _, events in found] == [removed(number) for number in range(5)]
    numbers = [number for number, _ in found]
    assert numbers == list(range(numbers[0], numbers[0] + 5))
    publisher.close()  # twice is fine


def test_missed_batches_can_be_asked_for(tmp_path: Path, context: zmq.Context) -> None:
    options = config(tmp_path, buffer_steps=4)
    publisher = KVEventPublisher(options)
    for number in range(6):
        publisher.publish(removed(number))
    socket = context.socket(zmq.DEALER)
    socket.connect(options.replay_endpoint or "")

    def ask(first: int) -> list[tuple[int, list[KVEvent]]]:
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        answers = []
        while True:
            assert socket.poll(TIMEOUT)
            _, *frames = socket.recv_multipart()
            if frames[0] == (-1).to_bytes(8, "big", signed=True):
                return answers
            answers.append(read(frames))

    deadline = time.monotonic() + 20
    while len(ask(0)) < 4 or ask(5) == []:
        assert time.monotonic() < deadline
    assert ask(0) == [(number, removed(number)) for number in (2, 3, 4, 5)], "the last four are kept"
    assert ask(4) == [(number, removed(number)) for number in (4, 5)]
    socket.send_multipart([b"", b"nonsense of another length"])
    assert ask(6) == []
    publisher.close()


def test_what_nobody_can_be_sent_is_a_gap_in_the_numbers(tmp_path: Path) -> None:
    publisher = KVEventPublisher(config(tmp_path))
    publisher.close()  # its thread is gone, and takes nothing any more
    publisher._queue.maxsize = 1
    for number in range(3):
        publisher.publish(removed(number))
    assert publisher.num_lost == 2


def test_bad_addresses_and_options() -> None:
    with pytest.raises(ConfigError, match=r"no events can be published at endpoint='tcp://\*:nowhere'"):
        KVEventPublisher(KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:nowhere"))
    with pytest.raises(ConfigError, match="no events can be published at .* surrogates not allowed"):
        KVEventPublisher(KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://\ud800"))
    with pytest.raises(ConfigError, match="hwm must be an integer, from 0 to"):
        KVEventsConfig(hwm=2**31)
    with pytest.raises(ConfigError, match="^kv_events_config: publisher must be one of 'zmq', 'null', got 'kafka'"):
        read_options(KVEventsConfig, {"publisher": "kafka"}, "kv_events_config")
    with pytest.raises(ConfigError, match="kv_events_config has no option 'endpiont'. Did you mean 'endpoint'"):
        read_options(KVEventsConfig, {"endpiont": "tcp://*:1"}, "kv_events_config")
    with pytest.raises(ConfigError, match="buffer_steps"):
        read_options(KVEventsConfig, {"buffer_steps": -1}, "kv_events_config")
    assert not read_options(KVEventsConfig, {"endpoint": "tcp://*:1"}, "kv_events_config").is_on
    assert not read_options(KVEventsConfig, {}, "kv_events_config").is_on
