"""The publisher of KV events over ZeroMQ, as vLLM's: numbered batches on a PUB socket, old ones again on a ROUTER.

The engine core hands it a batch a step; a thread of its own sends. Subscribers get (topic, number, batch), the number
in eight bytes, big-endian. Who missed some sends the first number that it lacks to the other socket, from a REQ or
DEALER, and gets those that are still kept, one message each, then the number -1.
"""

import queue
import re
import threading
import time
from collections import deque

import msgspec
import zmq

from quire.config.kv_events import KVEventsConfig
from quire.errors import ConfigError
from quire.protocol.kv_events import KVEvent, KVEventBatch
from quire.utils.logs import logger

_END = (-1).to_bytes(8, "big", signed=True)
_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 2.0


class KVEventPublisher:
    """Publishes KV events until it is closed.

    Attributes:
        num_lost: batches that nobody could be sent, as too many waited; their numbers are missing.

    Raises:
        ConfigError: an address can't be used.
    """

    def __init__(self, config: KVEventsConfig, rank: int = 0) -> None:
        """`rank`: the engine's, where there are several; its events say so, and its addresses are as many further."""
        self.num_lost, self._rank = 0, rank
        self._topic = config.topic.encode("utf-8", "surrogatepass")
        self._encoder = msgspec.msgpack.Encoder()
        self._queue: queue.Queue[tuple[int, KVEventBatch] | None] = queue.Queue(config.max_queue_size)
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._num_published = 0
        self._context = zmq.Context()
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.set_hwm(config.hwm)
        self._replay = self._context.socket(zmq.ROUTER) if config.replay_endpoint else None
        try:
            endpoint = _address(config.endpoint, rank)
            binds = "*" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
            (self._publisher.bind if binds else self._publisher.connect)(endpoint)
            if self._replay is not None:
                self._replay.bind(_address(config.replay_endpoint or "", rank))
        except (zmq.ZMQError, UnicodeError) as error:
            self._context.destroy(linger=0)
            places = f"endpoint={config.endpoint!r}, replay_endpoint={config.replay_endpoint!r}"
            raise ConfigError(f"kv_events_config: no events can be published at {places}: {error}.") from error
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: list[KVEvent]) -> None:
        """Send what happened in a step; never waits."""
        number, self._num_published = self._num_published, self._num_published + 1
        try:
            self._queue.put_nowait((number, KVEventBatch(time.time(), events, self._rank)))
        except queue.Full:
            if not self.num_lost:
                logger.warning("KV events are lost: too many wait to be sent; subscribers see a gap in the numbers")
            self.num_lost += 1

    def close(self) -> None:
        """Send what waits, and end. Safe to call twice."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while True:
                while self._replay is not None and self._replay.poll(0):
                    self._send_again(self._replay)
                try:
                    entry = self._queue.get(timeout=_POLL_SECONDS)
                except queue.Empty:
                    continue
                if entry is None:
                    return
                number, batch = entry[0].to_bytes(8, "big"), self._encoder.encode(entry[1])
                self._publisher.send_multipart((self._topic, number, batch))
                self._sent.append((number, batch))
        except Exception:
            logger.exception("KV events are no longer published")
        finally:
            self._context.destroy(linger=int(_CLOSE_SECONDS * 1000))

    def _send_again(self, replay: zmq.Socket[bytes]) -> None:
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.debug("a request for past KV events has %d frames and not 3, or no number of 8 bytes", len(frames))
            return
        asker, _, first = frames
        for number, batch in list(self._sent):
            if number >= first:  # big-endian: bytes compare as numbers do
                replay.send_multipart((asker, b"", number, batch))
        replay.send_multipart((asker, b"", _END, b""))


def _address(address: str, rank: int) -> str:
    """The one of several engines: with the port `rank` higher, or with a name of its own."""
    if address.startswith("tcp://"):
        return re.sub(r"\d+$", lambda port: str(int(port[0]) + rank), address)
    return f"{address}_dp{rank}" if rank else address
