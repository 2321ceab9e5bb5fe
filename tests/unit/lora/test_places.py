"""Places of adapters on the workers: who has one, who waits, and what an ended request leaves behind."""

from quire.lora.places import AdapterPlaces
from quire.protocol.requests import AdapterRef


def ref(number: int) -> AdapterRef:
    return AdapterRef(number, b"", str(number))


def test_a_place_goes_on_when_its_users_have_ended() -> None:
    live = {"a", "b"}
    places = AdapterPlaces(1, live.__contains__)
    places.add("a", ref(1))
    assert places.take() == ([], [])
    assert places.take(ready=[1]) == (["a"], [])
    places.add("b", ref(2))
    assert places.take() == ([], [])
    assert not places.loading, "its place is in use"
    live.remove("a")
    places.take()
    assert [place for place, _ in places.wanted] == [0]
    assert places.take(ready=[2]) == (["b"], [])


def test_an_id_that_comes_again_holds_no_place_of_its_first_life() -> None:
    live = {"a", "b"}
    places = AdapterPlaces(1, live.__contains__)
    places.add("a", ref(1))
    places.take()
    places.take(ready=[1])
    places.add("a", None)  # it has ended, and now comes without an adapter
    places.add("b", ref(2))
    places.take()
    assert [own.adapter_id for _, own in places.wanted] == [2]
