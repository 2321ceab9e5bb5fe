"""Block files: what is read is what was written, or nothing; and nothing that happens on the disk raises."""

import os
from pathlib import Path

import pytest

from quire.worker.blockfiles import BlockFiles, BlockFolder, block_paths

SIZE = 1000
NAMES = [bytes([i]) * 32 for i in range(10)]


def folder(path: Path, fingerprint: int = 1, limit: int = 10**6) -> BlockFolder:
    return BlockFolder(path, bytes([fingerprint]) * 32, limit, [SIZE, 2 * SIZE])


def content(i: int, group: int = 0) -> memoryview:
    return memoryview(bytes([i + 7 * group]) * SIZE * (group + 1))


def written(place: BlockFolder, count: int = 3) -> BlockFiles:
    """A folder with blocks 0 .. count - 1 of both groups, and the closed one that wrote them."""
    files = BlockFiles(place)
    files.start()
    for i in range(count):
        for group in (0, 1):
            files.write(group, NAMES[i], content(i, group))
    files.close()
    return files


def read(files: BlockFiles, group: int, name: bytes) -> bytes | None:
    files.read(group, 5, name)
    (answer,) = files.answers(10.0)
    assert (answer.group, answer.host) == (group, 5)
    return None if answer.data is None else bytes(answer.data)


def test_another_engine_finds_what_one_has_written(tmp_path: Path) -> None:
    place = folder(tmp_path / "new" / "blocks")
    assert written(place).news([]).num_written == 6
    files = BlockFiles(place)
    assert [sorted(names) for names in files.start()] == [NAMES[:3], NAMES[:3]]
    for i in range(3):
        assert read(files, 0, NAMES[i]) == bytes(content(i))
        assert read(files, 1, NAMES[i]) == bytes(content(i, 1))
    assert read(files, 0, NAMES[5]) is None
    files.close()
    files.close()
    assert not list(place.path.glob("*.partial"))


def test_what_waits_to_be_written_is_found(tmp_path: Path) -> None:
    """Reads come first, so whoever asks for a block that was handed over just now would hear that there is none."""
    files = BlockFiles(folder(tmp_path))
    files.write(0, NAMES[0], content(0))
    files.read(0, 5, NAMES[0])
    files.start()
    (answer,) = files.answers(10.0)
    assert answer.data == content(0)
    files.close()
    assert files.news([]).num_written == 1
    assert len(list(block_paths(tmp_path))) == 1


@pytest.mark.parametrize("fault", ["flipped", "truncated", "longer", "empty", "of another block", "of another model"])
def test_what_is_not_as_it_should_be_is_never_read(tmp_path: Path, fault: str) -> None:
    place, other = folder(tmp_path), folder(tmp_path, fingerprint=2)
    written(place)
    written(other)
    files = BlockFiles(place)
    files.start()
    path = place.file(0, NAMES[0])
    data = bytearray(path.read_bytes())
    if fault == "flipped":
        data[len(data) // 2] ^= 1
    elif fault == "truncated":
        del data[-40:]
    elif fault == "longer":
        data += b"x"
    elif fault == "empty":
        data.clear()
    elif fault == "of another block":
        data = bytearray(place.file(0, NAMES[1]).read_bytes())
    else:
        data = bytearray(other.file(0, NAMES[0]).read_bytes())
    path.write_bytes(data)
    assert read(files, 0, NAMES[0]) is None
    assert files.news([]).num_damaged == 1
    assert read(files, 0, NAMES[2]) == bytes(content(2)), "the others are not touched"
    files.close()


def test_files_of_the_wrong_size_are_not_even_offered(tmp_path: Path) -> None:
    place = folder(tmp_path)
    written(place)
    with place.file(1, NAMES[1]).open("ab") as file:
        file.write(b"more")
    files = BlockFiles(place)
    assert NAMES[1] not in files.start()[1]
    assert files.news([]).num_damaged == 1
    files.close()


def test_blocks_of_other_models_are_others(tmp_path: Path) -> None:
    written(folder(tmp_path))
    files = BlockFiles(folder(tmp_path, fingerprint=2))
    assert files.start() == [[], []]
    files.close()


def test_the_folder_stays_within_its_limit_and_old_blocks_go_first(tmp_path: Path) -> None:
    size = written(folder(tmp_path / "measure"), 1).news([]) and sum(
        path.stat().st_size for path in block_paths(tmp_path / "measure")
    )
    place = folder(tmp_path / "small", limit=4 * size)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "mine.kv").write_text("not a block")
    written(place, 3)
    for i in range(3):
        for group in (0, 1):
            os.utime(place.file(group, NAMES[i]), (1000 - i, 1000 - i))  # the last one is the oldest
    files = BlockFiles(place)
    files.start()
    for i in range(3, 6):
        files.write(0, NAMES[i], content(i))
        files.write(1, NAMES[i], content(i, 1))
    files.close()
    left = list(block_paths(place.path))
    assert sum(path.stat().st_size for path in left) <= place.limit
    assert files.news([]).num_removed > 0
    assert not place.file(0, NAMES[2]).exists()
    assert place.file(1, NAMES[5]).exists()
    assert (tmp_path / "small" / "mine.kv").exists()


def test_a_full_disk_is_counted_and_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        news = written(folder(tmp_path)).news([])
    assert (news.num_written, news.num_failed) == (0, 6)
    assert caplog.text.count("No space left on device") == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "what was begun is removed"


def test_a_place_where_no_folder_can_be_is_counted_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    files = written(folder(tmp_path / "file" / "blocks"))
    assert files.news([]).num_failed == 6
    assert caplog.text.count("serving goes on") == 1


def test_two_may_write_the_same(tmp_path: Path) -> None:
    files = [BlockFiles(folder(tmp_path)) for _ in range(2)]
    for one in files:
        one.start()
    for i in range(10):
        for one in files:
            one.write(0, NAMES[i], content(i))
    for one in files:
        one.close()
    third = BlockFiles(folder(tmp_path))
    assert sorted(third.start()[0]) == NAMES
    assert read(third, 0, NAMES[4]) == bytes(content(4))
    third.close()


def test_answers_to_what_was_forgotten_do_not_come(tmp_path: Path) -> None:
    written(folder(tmp_path))
    files = BlockFiles(folder(tmp_path))
    files.start()
    for i in range(3):
        files.read(0, i, NAMES[i])
    files.forget_reads()
    files.read(0, 9, NAMES[1])
    (answer,) = files.answers(10.0)
    assert answer.host == 9
    assert files.answers(0.0) == []
    files.close()


def test_a_folder_that_can_t_be_made_smaller_takes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(folder(tmp_path))
    monkeypatch.setattr("quire.worker.blockfiles.remove", lambda path: None)
    monkeypatch.setattr(BlockFiles, "_make_room", lambda self, size: False)
    files = BlockFiles(folder(tmp_path, limit=5000))
    files.start()
    for i in range(4, 8):
        files.write(0, NAMES[i], content(i))
    files.close()
    assert files.news([]).num_failed == 4


def test_a_fault_in_reading_is_an_answer_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Path) -> bytes:
        raise MemoryError

    written(folder(tmp_path))
    files = BlockFiles(folder(tmp_path))
    files.start()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", broken)
        assert read(files, 0, NAMES[0]) is None
    assert read(files, 0, NAMES[0]) == bytes(content(0))
    files.close()
