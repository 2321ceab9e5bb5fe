"""The scheduler's state as a person looks at it: the first sequences, and those that are watched."""

from typing import Any

import pytest

from quire.scheduler import scheduler


def test_watched_requests_are_there_however_many_come_first(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_SEQUENCES", 2)
    d = driver(max_num_seqs=1)
    for name in "abcde":
        d.add(name, 4, max_tokens=2)
    d.step()

    def look(*watched: str) -> list[str]:
        taken = d.scheduler.snapshot(d.scheduler.stats(), 1.0, watched)
        assert taken.num_sequences == 5
        return [sequence.request_id for sequence in taken.sequences]

    assert look() == ["a", "b"]
    assert look("b", "e", "gone", "d") == ["a", "b", "e", "d"]  # each once, and none for what has ended
    (last,) = d.scheduler.snapshot(d.scheduler.stats(), 1.0, ["e"]).sequences[2:]
    assert last.why is not None
    assert "3 requests come first" in last.why
