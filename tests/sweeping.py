"""Sweeps of many cases: those in which each two values meet, and cases so small that pytest takes longer with each."""

import functools
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any


def covering(rows: Sequence[Mapping[str, str]]) -> Iterator[int]:
    """Places of rows in which every pair of (parameter, value) that meets in any row meets, chosen greedily."""
    pairs = [set(itertools.combinations(sorted(row.items()), 2)) or {tuple(row.items())} for row in rows]
    missing: set[object] = set().union(*pairs)
    while missing:
        best = max(range(len(rows)), key=lambda place: len(pairs[place] & missing))
        missing -= pairs[best]
        yield best


Axes = Mapping[str | tuple[str, ...], Iterable[Any]]  # values by name, or tuples of values by names


def each(axes: Axes) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """One test of the cases that `pytest.mark.parametrize` would make of the axes; a failure tells its own.

    Each two values meet in a case; in nightly runs there is every case.
    """

    def of_all(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(*bound: Any, **fixtures: Any) -> None:
            for case in cases:
                try:
                    test(*bound, **fixtures, **case)
                except BaseException as error:
                    error.add_note(f"in the case of {', '.join(f'{name}={value}' for name, value in case.items())}")
                    raise

        cases = _cases(axes)
        signature = inspect.signature(test)
        fixtures = [one for name, one in signature.parameters.items() if name not in cases[0]]
        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return run

    return of_all


def _cases(axes: Axes) -> list[dict[str, Any]]:
    named = [[_named(names, value) for value in values] for names, values in axes.items()]
    rows = [*itertools.product(*map(enumerate, named))]
    chosen: Iterable[int] = range(len(rows))
    if os.environ.get("QUIRE_NIGHTLY") != "1":
        chosen = covering([{str(axis): str(place) for axis, (place, _) in enumerate(row)} for row in rows])
    return [dict(itertools.chain.from_iterable(part.items() for _, part in rows[i])) for i in chosen]


def _named(names: str | tuple[str, ...], value: Any) -> dict[str, Any]:
    return {names: value} if isinstance(names, str) else dict(zip(names, value, strict=True))
