"""A mapped file that moves to huge pages: contents, addresses and file stay, whoever reads or stops it meanwhile."""

import gc
import mmap
import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.ops.native.library import loaded_library
from quire.worker.pages import HUGE_PAGE
from tests.pages import into_small_pages, needs_huge_pages, own_bytes
from tests.waiting import wait_until

pytestmark = needs_huge_pages


def mapped(path: Path, flags: int = mmap.MAP_PRIVATE) -> Tensor:
    with path.open("rb") as file:
        region = mmap.mmap(file.fileno(), 0, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(region, dtype=torch.uint8)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(torch.randint(256, (11 * HUGE_PAGE // 2,), dtype=torch.uint8).numpy().tobytes())
    into_small_pages(path)
    return path


def whole_bytes(tensor: Tensor) -> int:
    return (tensor.numel() - -tensor.data_ptr() % HUGE_PAGE) // HUGE_PAGE * HUGE_PAGE


def begin(tensor: Tensor) -> None:
    loaded_library().quire_huge_pages(tensor.data_ptr(), tensor.numel())


def end(tensor: Tensor) -> None:
    loaded_library().quire_huge_pages(tensor.data_ptr(), 0)


def test_it_moves_with_its_contents(weights: Path) -> None:
    """And what is written there afterwards is its process's own."""
    tensor, content = mapped(weights), weights.read_bytes()
    address, expected = tensor.data_ptr(), torch.frombuffer(bytearray(content), dtype=torch.uint8)
    assert whole_bytes(tensor) >= 4 * HUGE_PAGE
    assert own_bytes(tensor) == 0
    begin(tensor)
    wait_until(lambda: own_bytes(tensor) == whole_bytes(tensor))
    end(tensor)
    assert tensor.data_ptr() == address
    assert torch.equal(tensor, expected)
    tensor += 1
    assert torch.equal(tensor, expected + 1)
    assert weights.read_bytes() == content


def test_who_reads_meanwhile_reads_the_same(weights: Path) -> None:
    first = torch.frombuffer(bytearray(weights.read_bytes()), dtype=torch.uint8)
    found: list[bool] = []
    for _ in range(5):
        tensor, is_over = mapped(weights), threading.Event()

        def read(tensor: Tensor = tensor, is_over: threading.Event = is_over) -> None:
            while not is_over.is_set():
                found.append(torch.equal(tensor, first))

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        begin(tensor)
        wait_until(lambda tensor=tensor: own_bytes(tensor) == whole_bytes(tensor))
        end(tensor)
        is_over.set()
        for reader in readers:
            reader.join()
    assert found
    assert all(found)


def test_one_that_is_told_to_stay_stays(weights: Path) -> None:
    """At once, and for good: it may be unmapped then, with nothing that comes to lie there in danger."""
    content = torch.frombuffer(bytearray(weights.read_bytes()), dtype=torch.uint8)
    for _ in range(30):
        tensor = mapped(weights)
        begin(tensor)
        end(tensor)
        own = own_bytes(tensor)
        assert torch.equal(tensor, content)
        assert own_bytes(tensor) == own
        end(tensor)  # of nothing
        del tensor
        gc.collect()
        others = [torch.full((HUGE_PAGE,), 7, dtype=torch.uint8) for _ in range(4)]
        assert all(bool((other == 7).all()) for other in others)


def test_one_that_memory_has_no_room_for_beside_itself_stays(tmp_path: Path) -> None:
    found = re.search(r"MemTotal: +(\d+)", Path("/proc/meminfo").read_text())
    assert found is not None
    path = tmp_path / "weights"
    path.touch()
    os.truncate(path, 1024 * int(found[1]))  # of which the disk holds nothing
    tensor = mapped(path, mmap.MAP_PRIVATE | 0x4000)  # MAP_NORESERVE
    begin(tensor)
    time.sleep(0.3)
    assert own_bytes(tensor) == 0
    end(tensor)
    assert own_bytes(tensor) == 0


def test_many_at_once(weights: Path) -> None:
    tensors = [mapped(weights) for _ in range(4)]
    for tensor in tensors:
        begin(tensor)
    end(tensors[1])
    for tensor in tensors[:1] + tensors[2:]:
        wait_until(lambda tensor=tensor: own_bytes(tensor) == whole_bytes(tensor))
    assert len({tensor.numpy().tobytes() for tensor in tensors}) == 1
    for tensor in tensors:
        end(tensor)
