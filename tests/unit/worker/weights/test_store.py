"""Packed weights on disk: found again at the next start, and never in the way of one when disk or file are bad."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.worker.weights import cache
from quire.worker.weights import store as weight_store
from quire.worker.weights.cache import StorePlace
from quire.worker.weights.store import StaleStoreError, WeightStore, checksum
from tests.pages import into_small_pages, needs_huge_pages, own_bytes
from tests.waiting import wait_until

BROKEN = [b"[" * 100_000, b"5", b"{}", b"null"]
SHAPES: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((3, 5, 7), torch.uint8),
    ((6,), torch.float32),
    ((2000, 9), torch.uint8),
]


def store_at(path: Path) -> WeightStore:
    return WeightStore(StorePlace(path))


def store_path(files: list[Path], layout: str) -> Path | None:
    place = cache.find_place(files, "model", "bfloat16", layout, 2**40)
    return place and place.path


def allocate(store: WeightStore) -> list[Tensor]:
    tensors = [store.allocate(shape, dtype) for shape, dtype in SHAPES]
    store.verified()
    return tensors


def keep(path: Path, value: int = 1) -> list[Tensor]:
    """Fill a store as a first start does, and wait until it is on the disk."""
    store = store_at(path)
    assert not store.filled
    tensors = allocate(store)
    assert not any(t.any() for t in tensors), "fresh memory is zero"
    for i, tensor in enumerate(tensors):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 251 + i + value)
    store.finish()
    store.settle()
    return tensors


def test_the_next_start_finds_the_weights(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "store.bin"
    first = keep(path)
    again = store_at(path)
    assert again.filled
    second = allocate(again)
    for one, two in zip(first, second, strict=True):
        assert (one.shape, one.dtype) == (two.shape, two.dtype)
        assert torch.equal(one, two)
        assert two.data_ptr() % 64 == 0
    assert [p.name for p in path.parent.iterdir()] == ["store.bin"]


def test_a_change_stays_in_its_process(tmp_path: Path) -> None:
    """`LLM.apply_model` may write to weights."""
    path = tmp_path / "store.bin"
    first = keep(path)
    content = path.read_bytes()
    again = store_at(path)
    second = allocate(again)
    second[0].zero_()
    again.finish()
    again.settle()
    assert path.read_bytes() == content
    assert torch.equal(allocate(store_at(path))[0], first[0])


def test_what_is_mapped_may_move_until_it_is_settled_or_gone(tmp_path: Path) -> None:
    path, shape = tmp_path / "store.bin", (3 << 20,)
    store = store_at(path)
    one, two = (store.allocate(shape, torch.uint8, name) for name in "ab")
    one.fill_(1)
    two.fill_(2)
    store.finish()
    store.use_huge_pages(lambda: 2**40)  # nothing is mapped
    store.settle()
    content = path.read_bytes()
    for _ in range(20):
        again = store_at(path)
        first, second = (again.allocate(shape, torch.uint8, name) for name in "ab")
        again.verified().use_huge_pages(lambda: 2**40)
        assert torch.equal(first, one)
        assert torch.equal(second, two)
        again.settle()
        first.fill_(3)
        time.sleep(0.005)
        assert torch.equal(first, torch.full(shape, 3, dtype=torch.uint8))
        assert path.read_bytes() == content
        dropped = store_at(path)
        dropped.allocate(shape, torch.uint8, "a")
        dropped.use_huge_pages(lambda: 2**40)
        del dropped


@needs_huge_pages
def test_what_is_mapped_stays_where_memory_is_short(tmp_path: Path) -> None:
    """A container's, say: for the move, and for the file that the next start is to find in memory."""
    path = tmp_path / "store.bin"
    store = store_at(path)
    store.allocate((5 << 20,), torch.uint8).fill_(7)
    store.finish()
    store.settle()
    into_small_pages(path)
    again = store_at(path)
    tensor = again.allocate((5 << 20,), torch.uint8)
    again.verified().use_huge_pages(lambda: 2 * path.stat().st_size)
    time.sleep(0.1)
    assert own_bytes(tensor) == 0
    again.use_huge_pages(lambda: 2 * path.stat().st_size + 1)
    wait_until(lambda: own_bytes(tensor) >= 2 << 20)
    again.settle()


def test_no_path_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = WeightStore(None)
    assert not store.filled
    allocate(store)
    store.finish()
    store.settle()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_steps_come_before_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    priorities: list[int] = []

    written = WeightStore._parts

    def parts(store: WeightStore, place: StorePlace) -> Iterator[memoryview]:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        yield from written(store, place)

    monkeypatch.setattr(WeightStore, "_parts", parts)
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    keep(tmp_path / "store.bin")
    assert priorities == [19]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_nothing_is_written_before_the_weights_are_complete(tmp_path: Path) -> None:
    allocate(store_at(tmp_path / "store.bin"))
    assert list(tmp_path.iterdir()) == []


def test_racing_starts_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "store.bin"
    stores = [store_at(path) for _ in range(4)]
    tensors = [allocate(store) for store in stores]
    for value, (store, mine) in enumerate(zip(stores, tensors, strict=True)):
        for tensor in mine:
            tensor.fill_(value + 1)
        store.finish()
    for store in stores:
        store.settle()
    found = allocate(store_at(path))
    values = {int(t[0]) for t in (t.flatten() for t in found) if t.numel()}
    assert len(values) == 1, "a mixture of two writers"
    assert values <= {1, 2, 3, 4}
    assert all((t == t.flatten()[0]).all() for t in found if t.numel())
    assert [p.name for p in tmp_path.iterdir()] == ["store.bin"]


def test_a_reader_keeps_what_it_opened(tmp_path: Path) -> None:
    path = tmp_path / "store.bin"
    first = keep(path, 1)
    reader = allocate(store_at(path))
    path.unlink()
    keep(path, 2)
    assert all(torch.equal(one, two) for one, two in zip(first, reader, strict=True))


@pytest.mark.parametrize("name", ["posix_fallocate", "pwritev", "link", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, code: int
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(weight_store.os, name, fail)
        tensors = keep(tmp_path / "store.bin")
    assert f"packed weights are not kept on disk: {tmp_path}: {os.strerror(code)}" in caplog.text
    assert list(tmp_path.iterdir()) == []
    assert tensors[0].any(), "the weights in memory are as they were"


def test_a_system_that_can_not_reserve_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As macOS, whose Python lacks the call."""
    monkeypatch.delattr(weight_store.os, "posix_fallocate")
    tensors = keep(tmp_path / "store.bin")
    found = allocate(store_at(tmp_path / "store.bin"))
    assert all(torch.equal(one, two) for one, two in zip(tensors, found, strict=True))


def test_a_disk_that_fills_up_midway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def write(file: int, parts: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "full")
        return os.pwrite(file, b"".join(parts)[:1000], offset)  # a short write is none of the errors

    with monkeypatch.context() as patch:
        patch.setattr(weight_store.os, "pwritev", write)
        keep(tmp_path / "store.bin")
    assert len(calls) == 4
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [999, 4096, 5000])
def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(weight_store.os, "pwritev", lambda f, parts, o: os.pwrite(f, b"".join(parts)[:length], o))
        first = keep(tmp_path / "store.bin")
    assert all(torch.equal(a, b) for a, b in zip(first, allocate(store_at(tmp_path / "store.bin")), strict=True))


def test_each_write_fills_a_huge_page_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the system would keep small ones in memory, and the next start would read weights through them."""
    calls: list[tuple[int, int]] = []
    real = os.pwritev

    def noted(file: int, parts: list[memoryview], offset: int) -> int:
        calls.append((offset, sum(map(len, parts))))
        return real(file, parts, offset)

    monkeypatch.setattr(weight_store, "HUGE_PAGE", 8192)
    monkeypatch.setattr(os, "pwritev", noted)
    keep(tmp_path / "weights")
    size = (tmp_path / "weights").stat().st_size
    assert size > 3 * 8192
    assert calls == [(start, min(8192, size - start)) for start in range(0, size, 8192)]


def test_a_place_where_no_directory_can_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    keep(tmp_path / "file" / "store.bin")
    assert f"packed weights are not kept on disk: {tmp_path / 'file'}: " in caplog.text


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "store.bin"
    keep(path)
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 1013), *range(len(whole) - 300, len(whole), 7)]:
        path.write_bytes(whole[:length])
        assert not store_at(path).filled, length
        assert not path.exists(), "a broken file is removed, so that this start writes a good one"


def with_manifest(path: Path, manifest: bytes) -> None:
    """Replace the manifest at the end of a store's file, checksum and length with it."""
    whole = path.read_bytes()
    length = int.from_bytes(whole[-8:], "little")
    trailer = zlib.crc32(manifest).to_bytes(8, "little") + len(manifest).to_bytes(8, "little")
    path.write_bytes(whole[: -16 - length] + manifest + trailer)


def manifest_of(path: Path) -> dict[str, Any]:
    whole = path.read_bytes()
    return json.loads(whole[-16 - int.from_bytes(whole[-8:], "little") : -16])


@pytest.mark.parametrize(
    "manifest",
    [b"", b"{", b"\xff\xfe", b'"text"', *BROKEN],
    ids=len,
)
def test_a_broken_manifest_is_noticed(tmp_path: Path, manifest: bytes) -> None:
    path = tmp_path / "store.bin"
    keep(path)
    with_manifest(path, manifest)
    check_rebuilt(path)


def check_rebuilt(path: Path) -> None:
    """A start that meets a bad file ends up with a good one: at once, or after it is told that the file is stale."""
    try:
        store = store_at(path)
        allocate(store)
        assert not store.filled
    except StaleStoreError:
        pass
    assert not path.exists()
    keep(path)
    assert store_at(path).filled


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[1:],
        lambda m: m[:1],
        lambda m: [],
        lambda m: [m[1], m[0], *m[2:]],
        lambda m: [m[0] | {"shape": [3, 5, 8]}, *m[1:]],
        lambda m: [m[0], m[1] | {"dtype": "torch.int8"}, *m[2:]],
        lambda m: [m[0], m[1] | {"offset": 8192}, *m[2:]],
        lambda m: [5, *m[1:]],
    ],
)
def test_a_file_of_other_weights_is_stale(tmp_path: Path, change: Callable[[list[Any]], list[Any]]) -> None:
    path = tmp_path / "store.bin"
    keep(path)
    manifest = manifest_of(path)
    with_manifest(path, json.dumps(manifest | {"tensors": change(manifest["tensors"])}).encode())
    store = store_at(path)
    assert store.filled
    with pytest.raises(StaleStoreError):
        allocate(store)
    assert not path.exists()
    check_rebuilt(path)


def test_a_file_that_is_too_short_for_its_manifest_is_stale(tmp_path: Path) -> None:
    path = tmp_path / "store.bin"
    keep(path)
    length = int.from_bytes(path.read_bytes()[-8:], "little")
    path.write_bytes(path.read_bytes()[-16 - length - 100 :])
    check_rebuilt(path)


def test_a_cache_that_cannot_be_written_to_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights that came with a container's image, on a file system that is read-only."""
    path = tmp_path / "store.bin"
    keep(path)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(weight_store.os, "utime", refuse)
        patch.setattr(Path, "unlink", refuse)
        assert store_at(path).filled
        with_manifest(path, b"{")
        assert not store_at(path).filled


def test_what_a_dead_process_left_is_removed(tmp_path: Path) -> None:
    """At once; what is of a process that lives is removed after a day, as it may be of another machine's."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    dead, odd = tmp_path / f"x.{gone.pid}.1.partial", tmp_path / "x.partial"
    old, young = tmp_path / f"x.{os.getpid()}.1.partial", tmp_path / f"x.{os.getpid()}.2.partial"
    for file in (dead, odd, old, young):
        file.write_bytes(b"half")
    yesterday = time.time() - 25 * 3600
    os.utime(old, (yesterday, yesterday))
    keep(tmp_path / "store.bin")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["store.bin", young.name])


@pytest.mark.slow
@pytest.mark.parametrize("nameless", [True, False])
def test_a_killed_writer_leaves_nothing_that_stays(tmp_path: Path, nameless: bool) -> None:
    """Killed amid its writing: no file, or where the file system has only files with names, none after the next."""
    script = f"""
import os, signal, sys
from pathlib import Path
import torch
from quire.worker.weights import store
from quire.worker.weights.cache import StorePlace
if not {nameless}:
    del os.O_TMPFILE
def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
kept = store.WeightStore(StorePlace(Path({str(tmp_path / "store.bin")!r})))
kept.allocate((1000,), torch.uint8)
store.os.pwritev = die
kept.finish()
kept.settle()
"""
    run = subprocess.run([sys.executable, "-c", script], check=False)
    assert run.returncode == -signal.SIGKILL
    names = [p.name for p in tmp_path.iterdir()]
    assert names == [] if nameless else len(names) == 1
    keep(tmp_path / "store.bin")
    assert [p.name for p in tmp_path.iterdir()] == ["store.bin"]


def test_a_file_system_without_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(weight_store.os, "O_TMPFILE")
    first = keep(tmp_path / "store.bin")
    assert [p.name for p in tmp_path.iterdir()] == ["store.bin"]
    assert all(torch.equal(a, b) for a, b in zip(first, allocate(store_at(tmp_path / "store.bin")), strict=True))


@pytest.mark.parametrize("place", [0, 100, 4096 + 23, 2 * 4096, 2 * 4096 + 17_999, 2 * 4096 + 9000])
def test_every_damaged_byte_of_a_tensor_is_noticed(
    tmp_path: Path, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "store.bin"
    keep(path)
    whole = bytearray(path.read_bytes())
    whole[place] ^= 4
    path.write_bytes(whole)
    store = store_at(path)
    with pytest.raises(StaleStoreError):
        allocate(store)
    assert f"the packed weights in {path} are damaged (tensor " in caplog.text
    assert not path.exists()
    check_rebuilt(path)


def test_a_checksum_tells_pages_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    flat = torch.randint(0, 256, (3 * 4096 + 5,), dtype=torch.uint8, generator=generator)
    swapped = torch.cat([flat[4096:8192], flat[:4096], flat[8192:]])
    zeroed = flat.clone()
    zeroed[4096:8192] = 0
    assert len({checksum(each) for each in (flat, swapped, zeroed, flat[:-1], flat[:0])}) == 5
    assert checksum(flat.clone()) == checksum(flat)


def test_a_damaged_manifest_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "store.bin"
    keep(path)
    whole = path.read_bytes()
    for place in range(len(whole) - 16 - int.from_bytes(whole[-8:], "little"), len(whole), 13):
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        assert not store_at(path).filled, place
        assert not path.exists()


def test_mapped_weights_are_told_of(tmp_path: Path) -> None:
    """Else a second start would count them among the memory that is free."""
    path = tmp_path / "store.bin"
    store = store_at(path)
    allocate(store)
    assert store.mapped_bytes == 0
    keep(path)
    assert store_at(path).mapped_bytes == 4096 + 4096 + 20480
    assert WeightStore(None).mapped_bytes == 0


def test_a_checkpoint_that_changed_is_packed_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where none of the bytes that are sampled did: under the same name."""
    caplog.set_level("INFO")
    place = StorePlace(tmp_path / "store.bin", model="llama", stamp=[["a", 5, 1_500_000_000]])
    store = WeightStore(place)
    allocate(store)
    store.finish()
    store.settle()
    assert WeightStore(place).filled
    seconds = [["a", 5, 1_000_000_000]]  # an archive's time
    assert WeightStore(replace(place, stamp=seconds)).filled
    for stamp in ([["a", 5, 1_500_000_001]], [["a", 6, 1_500_000_000]], [["b", 5, 1_500_000_000]], []):
        assert not WeightStore(replace(place, stamp=stamp)).filled
    assert "llama has changed on disk: packing its weights anew" in caplog.text
    assert place.path.exists()


def pack(place: StorePlace, value: int = 1) -> None:
    """As a start does that doesn't find its weights."""
    store = WeightStore(place)
    assert not store.filled
    for tensor in allocate(store):
        tensor.fill_(value)
    store.finish()
    store.settle()


def test_copies_of_a_checkpoint_share_a_file(tmp_path: Path) -> None:
    """Their files are of other times: each is packed once, not whenever the other was."""
    path = tmp_path / "store.bin"
    first, second, changed = (StorePlace(path, stamp=[["a", 5, time]]) for time in (1_100_000_001, 9_000_000_002, 7))
    pack(first)
    pack(second)
    assert WeightStore(first).filled
    assert WeightStore(second).filled
    pack(changed, value=2)  # under the same name, as none of the bytes that are sampled changed
    assert WeightStore(changed).filled
    pack(first)  # would find other weights
    assert not WeightStore(second).filled


def test_so_many_copies_share_a_file(tmp_path: Path) -> None:
    places = [StorePlace(tmp_path / "store.bin", stamp=[["a", 5, 10**9 * n + 1]]) for n in range(12)]
    for place in places:
        pack(place)
    assert [WeightStore(place).filled for place in places] == [False] * 4 + [True] * 8


def test_a_use_is_remembered(tmp_path: Path) -> None:
    """For whoever clears the cache by age."""
    path = tmp_path / "store.bin"
    keep(path)
    os.utime(path, (1, 1))
    assert store_at(path).filled
    assert time.time() - path.stat().st_mtime < 60


# ---- the file's name


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cache, "MIN_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(range(256)) * 100)
    return file


def test_the_name_tells_checkpoints_apart(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "model-00002.safetensors"
    shutil.copy2(checkpoint, other)
    names = {"one": store_path([checkpoint], "layout")}
    assert store_path([checkpoint], "layout") == names["one"]
    names["other layout"] = store_path([checkpoint], "layout2")
    names["two files"] = store_path([checkpoint, other], "layout")
    assert store_path([other, checkpoint], "layout") == names["two files"]
    stat, content = checkpoint.stat(), checkpoint.read_bytes()
    for place in (0, 5000, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        checkpoint.write_bytes(changed)
        os.utime(checkpoint, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        names[f"byte {place}"] = store_path([checkpoint], "layout")
    checkpoint.write_bytes(content)
    os.utime(checkpoint, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert store_path([checkpoint], "layout") == names["one"], "a time makes no second copy"
    assert None not in names.values()
    assert len(set(names.values())) == len(names)
    assert all(name.parent == tmp_path / "cache" / "quire" / "packed" for name in names.values() if name)
    assert not (tmp_path / "cache" / "quire").exists(), "a name makes no directory"


def test_without_xdg_it_is_in_the_home_directory(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = store_path([checkpoint], "")
    assert path is not None
    assert path.parent == tmp_path / "home" / ".cache" / "quire" / "packed"


def test_small_checkpoints_are_not_worth_a_file(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MIN_BYTES", 25_601)
    assert store_path([checkpoint], "") is None
    monkeypatch.setattr(cache, "MIN_BYTES", 25_600)
    assert store_path([checkpoint], "") is not None
    assert store_path([], "") is None or cache.MIN_BYTES == 0


def test_gguf_files_of_a_folder_do_not_replace_each_other(checkpoint: Path, tmp_path: Path) -> None:
    """As a folder's own earlier weights are replaced: whoever runs two by turns would pack each anew for ever."""
    for number, name in enumerate(("a.gguf", "b.GGUF", "a.gguf")):
        (tmp_path / name).write_bytes(bytes([number]) * 30_000)
        place = cache.find_place([tmp_path / name], name, "", "layout", 1 << 30)
        assert place is not None
        pack(place)
    assert sorted(each.model for each in cache.stored_weights(place.path.parent)) == ["a.gguf", "b.GGUF"]


def test_no_room_no_file(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def with_free(num_bytes: int) -> Path | None:
        usage = shutil._ntuple_diskusage(10**9, 10**9 - num_bytes, num_bytes)  # type: ignore[attr-defined]
        monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: usage)
        return store_path([checkpoint], "")

    os.truncate(checkpoint, 30 << 20)
    path = with_free(70 << 20)
    assert path is not None
    assert not caplog.text
    assert with_free(50 << 20) is None
    assert f"packed weights are not kept on disk: {path.parent} has 50 MiB free, and should have 60" in caplog.text
    path.parent.mkdir(parents=True)
    path.touch()
    assert with_free(50 << 20) == path, "what is there needs no more room"


def test_without_a_home_nothing_is_kept(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A container's user that has no entry, or a HOME that is another user's."""
    monkeypatch.delenv("XDG_CACHE_HOME")

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    assert store_path([checkpoint], "") is None
    assert "packed weights are not kept on disk: this user has no home; set XDG_CACHE_HOME" in caplog.text

    def refuse(self: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "home", lambda: tmp_path / "closed")
    monkeypatch.setattr(Path, "exists", refuse)
    assert store_path([checkpoint], "") is None
    folder = tmp_path / "closed" / ".cache" / "quire" / "packed"
    assert f"packed weights are not kept on disk: {folder}: Permission denied" in caplog.text


def test_a_script_waits_for_the_writer(tmp_path: Path) -> None:
    """The thread is no daemon: the interpreter joins it."""
    store = store_at(tmp_path / "store.bin")
    allocate(store)
    store.finish()
    assert not any(t.daemon for t in threading.enumerate() if t.name == "quire-weight-store")
    store.settle()
