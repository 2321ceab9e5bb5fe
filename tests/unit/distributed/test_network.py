"""Groups of ranks on several machines, here threads that gloo connects over loopback."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from quire.distributed import network
from quire.distributed.network import NetworkGroup


def test_a_rank_that_computes_for_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than all have to come: whether it still lives, others see."""
    monkeypatch.setattr(network, "_SECONDS", timedelta(seconds=2))
    store = HashStore()

    def gathered(rank: int) -> list[int]:
        group = NetworkGroup(store, "127.0.0.1", rank, 2)
        time.sleep(4 * rank)
        return group.gather(torch.tensor([[rank + 5]]), [0, 1, 2]).tolist()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(gathered, range(2))) == [[[5, 6]]] * 2
