"""A device's order of work, as the host sees it: it hands work over, goes on, and asks later whether that is done.

The CUDA device and all that belongs to it go through this one door, so that they are tested without a GPU, on a stream
that does all work at once. Knows no model and no step.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.errors import ConfigError

MIN_CAPABILITY = (8, 0)  # Ampere: the first whose matrix units know bf16, and with shared memory for the tiles


class CudaStream:
    """The current stream of a GPU, and its memory.

    Attributes:
        device: where its tensors are.
        capability: the GPU's compute capability.

    Raises:
        ConfigError: there is no GPU that can be used; it says why, and what to do.
    """

    def __init__(self) -> None:
        if (why := why_no_gpu()) is not None:
            raise ConfigError(f"device='cuda': {why}")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.capability = torch.cuda.get_device_capability(self.device)

    def enter(self) -> None:
        """Let this thread, to which the first GPU is the current one whatever it is to others, work on this one."""
        torch.cuda.set_device(self.device)

    def mark(self) -> Any:
        """The place that the host has got to; its `synchronize` waits until the device has."""
        return torch.cuda.current_stream().record_event()

    def pinned(self, size: int, dtype: torch.dtype) -> Tensor:
        """Host memory that the device copies from and to while the host goes on."""
        return torch.empty(size, dtype=dtype, pin_memory=True)

    def capture(self, function: Callable[[], Tensor], pool: list[Any]) -> tuple[Tensor, Callable[[], None]]:
        """What the function returned, and a call that does its work again, on the very same tensors.

        `pool`: holds the memory that captures share, once there is any.
        """
        function()  # compiles what is not compiled yet, which a capture may not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        pool[:] = pool or [torch.cuda.graph_pool_handle()]
        with torch.cuda.graph(graph, pool=pool[0], capture_error_mode="thread_local"):  # others may load adapters
            result = function()
        return result, graph.replay

    def free_bytes(self) -> int:
        """Memory of the device that is not in use."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def total_bytes(self) -> int:
        """All memory of the device."""
        return torch.cuda.mem_get_info(self.device)[1]

    def peak_bytes(self, function: Callable[[], Any]) -> int:
        """Most bytes of new tensors that were alive at once while the function ran."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def why_no_gpu() -> str | None:
    """Why no GPU can be used here, and what to do; None if one can."""
    version = torch.__version__
    if torch.version.cuda is None:
        return (
            f"torch {version} is a build without CUDA. Install one that has it (pip install torch, from the ordinary "
            "index), or leave out device."
        )
    if not torch.cuda.is_available():
        return (
            f"torch {version} finds no GPU: no NVIDIA driver is loaded, none that knows CUDA {torch.version.cuda}, or "
            "CUDA_VISIBLE_DEVICES hides them all. nvidia-smi says which; device='cpu' does without."
        )
    if (has := torch.cuda.get_device_capability()) < MIN_CAPABILITY:
        name, least = torch.cuda.get_device_name(), ".".join(map(str, MIN_CAPABILITY))
        return f"{name} has compute capability {has[0]}.{has[1]}, below {least}: too old. Use device='cpu'."
    return None
