"""Steps' numbers on their way to a device: shapes and values arrive, whatever comes next and however much there is."""

import numpy as np
import torch

from quire.worker.devices.staging import NUM_BUFFERS, Staging
from tests.host_stream import HostStream


class CountingStream(HostStream):
    """Its marks say in which order they were waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[int] = []
        self.num_marks = 0

    def mark(self) -> "CountingStream.Mark":  # type: ignore[override]
        self.num_marks += 1
        return self.Mark(self, self.num_marks - 1)

    class Mark:
        def __init__(self, stream: "CountingStream", number: int) -> None:
            self.stream, self.number = stream, number

        def synchronize(self) -> None:
            self.stream.waited.append(self.number)


def test_arrays_arrive_in_their_shapes() -> None:
    arrays = [np.arange(5, dtype=np.int32), np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros(0, np.int32)]
    for given, got in zip(arrays, Staging(HostStream()).upload(arrays), strict=True):
        assert got.dtype is torch.int32
        assert got.tolist() == given.tolist()


def test_host_memory_is_written_again_only_when_the_device_has_read_it() -> None:
    stream = CountingStream()
    staging = Staging(stream)
    for step in range(2 * NUM_BUFFERS):
        staging.upload([np.full(3, step, np.int32)])
        assert stream.waited == list(range(step + 1 - NUM_BUFFERS)), "it waited for another copy than the oldest"


def test_a_step_larger_than_the_buffer() -> None:
    staging = Staging(HostStream())
    large = np.arange(100_000, dtype=np.int32)
    (got,) = staging.upload([large])
    assert torch.equal(got, torch.from_numpy(large))
    (small,) = staging.upload([np.array([7], np.int32)])
    assert small.tolist() == [7]
