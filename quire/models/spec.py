"""What is known of a checkpoint's tensor before it is read, whatever the files: sources tell it, builders ask.

Without torch, as a server of several models counts bytes by it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSpec:
    """One tensor before it is read; `num_bytes` is what it takes in the source."""

    name: str
    dtype: str  # in safetensors' names: "F32", "BF16", ...
    shape: tuple[int, ...]
    num_bytes: int
    file: str  # its name, for messages; "" where there is none
