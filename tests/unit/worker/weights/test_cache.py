"""The folder of packed weights stays within its limit, and says what is in it."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.worker.weights.cache import StorePlace, make_room, stored_weights
from quire.worker.weights.store import WeightStore

SIZE = 10 * 4096


def put(
    folder: Path, name: str, used: float, directory: str = "", content: str = "1", limit: int = 10**9, ranks: int = 1
) -> Path:
    """Keep SIZE bytes as a start at time `used` does."""
    place = StorePlace(
        folder / f"{name}.bin", f"model-{name}", "bfloat16", directory or f"/models/{name}", content, [], limit, ranks
    )
    store = WeightStore(place)
    store.allocate((SIZE,), torch.uint8)
    store.finish()
    store.settle()
    if place.path.exists():
        os.utime(place.path, (used, used))
    return place.path


def names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.iterdir())


def test_a_file_says_what_it_is(tmp_path: Path) -> None:
    put(tmp_path, "a", 100.0)
    put(tmp_path, "b", 200.0)
    (tmp_path / "c.bin").write_bytes(b"of another version")
    os.utime(tmp_path / "c.bin", (50, 50))
    found = stored_weights(tmp_path)
    assert [each.model for each in found] == ["model-b", "model-a", ""]
    assert found[0].weights == "bfloat16"
    assert found[0].used == 200.0
    assert found[0].num_bytes > SIZE
    assert stored_weights(tmp_path / "nowhere") == []


def test_the_one_used_longest_ago_makes_room(tmp_path: Path) -> None:
    limit = 4 * SIZE
    for name, used in (("a", 300.0), ("b", 100.0), ("c", 200.0)):
        put(tmp_path, name, used, limit=limit)
    assert names(tmp_path) == ["a", "b", "c"]
    put(tmp_path, "d", 400.0, limit=limit)
    assert names(tmp_path) == ["a", "c", "d"]
    put(tmp_path, "e", 500.0, limit=2 * SIZE + 3 * 4096)
    assert names(tmp_path) == ["d", "e"]


def test_the_newest_of_each_checkpoint_stays_longest(tmp_path: Path) -> None:
    limit = 4 * SIZE
    put(tmp_path, "lone", 100.0, limit=limit)
    put(tmp_path, "int8", 200.0, "/models/a", limit=limit)
    put(tmp_path, "int4", 300.0, "/models/a", limit=limit)
    put(tmp_path, "new", 400.0, limit=limit)
    assert names(tmp_path) == ["int4", "lone", "new"]


def test_ranks_do_not_push_out_each_others(tmp_path: Path) -> None:
    """Neither where all would be too much for the folder, nor where another checkpoint has to go."""
    for rank in range(2):
        put(tmp_path, f"rank{rank}", 100.0, "/models/a", limit=2 * SIZE - 1, ranks=2)
    assert not names(tmp_path)
    limit = 4 * SIZE
    put(tmp_path, "other", 100.0, limit=limit)
    put(tmp_path, "earlier", 200.0, "/models/a", limit=limit)
    for rank in range(2):
        put(tmp_path, f"rank{rank}", 300.0 + rank, "/models/a", limit=limit, ranks=2)
    assert names(tmp_path) == ["other", "rank0", "rank1"]
    put(tmp_path, "third", 400.0, limit=limit)
    assert names(tmp_path) == ["other", "rank1", "third"]
    os.utime(tmp_path / "rank1.bin", (500.0, 500.0))  # which the next start maps
    put(tmp_path, "rank0", 501.0, "/models/a", limit=limit, ranks=2)
    assert names(tmp_path) == ["rank0", "rank1", "third"]


def test_what_was_saved_over_goes_at_once(tmp_path: Path) -> None:
    put(tmp_path, "old", 100.0, "/models/a", content="1")
    put(tmp_path, "old-int8", 100.0, "/models/a", content="1")
    put(tmp_path, "other", 100.0, "/models/b", content="1")
    (tmp_path / "version.bin").write_bytes(b"of another version")
    put(tmp_path, "new", 200.0, "/models/a", content="2")
    assert names(tmp_path) == ["new", "other"]


def test_more_than_the_limit_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, "a", 100.0)
    put(tmp_path, "b", 200.0, limit=SIZE - 1)
    assert names(tmp_path) == ["a"]
    assert "weight_cache_size" in caplog.text
    place = StorePlace(tmp_path / "x.bin", directory="x", limit=SIZE)
    assert make_room(replace(place, limit=10**9), SIZE)
    assert names(tmp_path) == ["a"]
