"""Brings a step's numbers to a device that computes beside the host: all of them in one copy, which nobody waits for.

The CUDA device has one. Host memory takes turns, and is written again once the device has read it. Knows arrays of
int32, and nothing of what they mean.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.worker.devices.stream import CudaStream
from quire.worker.gather import Ints

NUM_BUFFERS = 3  # one more than steps are in flight


class Staging:
    """Buffers between the host and a device.

    Args:
        stream: the device's order of work.
    """

    def __init__(self, stream: CudaStream) -> None:
        self._stream = stream
        self._buffers = [stream.pinned(1 << 14, torch.int32) for _ in range(NUM_BUFFERS)]
        self._marks: list[Any] = [None] * NUM_BUFFERS
        self._next = 0

    def upload(self, arrays: Sequence[Ints]) -> list[Tensor]:
        """The arrays as tensors of the device, of their shapes."""
        number, self._next = self._next, (self._next + 1) % NUM_BUFFERS
        if (mark := self._marks[number]) is not None:
            mark.synchronize()
        size = sum(array.size for array in arrays)
        if size > len(self._buffers[number]):
            self._buffers[number] = self._stream.pinned(1 << math.ceil(math.log2(size)), torch.int32)
        host = self._buffers[number]
        np.concatenate([array.ravel() for array in arrays], out=host.numpy()[:size])
        device = host[:size].to(self._stream.device, non_blocking=True, copy=True)
        self._marks[number] = self._stream.mark()
        parts = device.split_with_sizes([array.size for array in arrays])
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
