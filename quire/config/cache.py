"""Configuration of the paged KV cache: how many blocks there are, how long they are, whether prefixes are kept.

Made by the engine once memory has been measured; read by the KV manager. It holds numbers only.
"""

from dataclasses import dataclass

from quire.config.options import check_number


@dataclass(frozen=True)
class CacheConfig:
    """The KV cache as the scheduler sees it.

    Attributes:
        num_blocks: blocks in the pool, a measured fact.
        block_size: tokens in a block.
        enable_prefix_caching: keep the blocks of computed prefixes for requests that begin alike.

    Raises:
        ConfigError: a number is not a positive integer.
    """

    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size"):
            check_number(name, getattr(self, name), int, 1)
