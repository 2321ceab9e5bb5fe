"""What all tests share."""

import atexit
import gc
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
import pytest

# Set before torch is first imported, and for child processes too: the models here are tiny, and two OpenMP threads on a
# busy machine wait for each other at every operation.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Likewise before Triton is, which transformers does: without a GPU its kernels are interpreted.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
# A shell's background job ignores Ctrl-C, and all that it starts: tests that interrupt something would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A loaded machine is no failure. CI draws the same examples every time; a developer's runs draw new ones.
hypothesis.settings.register_profile("local", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("local"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

# Files of single tests that take a minute or more come first: begun last, they would leave other processes idle.
_LONG = {"test_compiled.py", "test_levels.py", "test_packaging.py"}
_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT / "tests"))  # for chi_square.py and its like

from sweeping import covering  # noqa: E402


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The test material beside the repository (../shared/data); a test that needs it skips where it is absent."""
    path = _ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("needs ../shared/data beside the repository")
    return path


@pytest.fixture
def count_bytecodes() -> Callable[[Callable[[], Any]], int]:
    """How many Python instructions a call takes, with all that it calls: a cost that no busy machine changes."""

    def count(function: Callable[[], Any]) -> int:
        if sys.version_info >= (3, 12):
            return _monitored(function)
        num_bytecodes = 0

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal num_bytecodes
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            num_bytecodes += event == "opcode"
            return trace

        before = sys.gettrace()
        gc.disable()  # what it would call, finalizers of other tests' objects, is not the function's
        sys.settrace(trace)
        try:
            function()
        finally:
            sys.settrace(before)
            gc.enable()
        return num_bytecodes

    return count


def _monitored(function: Callable[[], Any]) -> int:
    """As of Python 3.12 tracing misses instructions of the first call."""
    monitoring: Any = sys.monitoring  # pyright: ignore[reportAttributeAccessIssue]
    tool, instruction = monitoring.PROFILER_ID, monitoring.events.INSTRUCTION
    counted = itertools.count()
    monitoring.use_tool_id(tool, "count_bytecodes")
    monitoring.register_callback(tool, instruction, lambda code, offset: next(counted))
    gc.disable()
    monitoring.set_events(tool, instruction)
    try:
        function()
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)
        gc.enable()
    return next(counted)


@pytest.fixture(scope="session", autouse=True)
def _no_cache_of_the_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test writes packed weights, or anything else, to the cache of whoever runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `level` runs once on each level of compiled kernels; without the library it is skipped."""
    if "level" in metafunc.fixturenames:
        from quire.ops.native.library import TORCH, levels

        metafunc.parametrize("level", [name for name in levels() if name != TORCH], indirect=True)


def pytest_sessionstart(session: pytest.Session) -> None:
    """With several processes, look at the library before they start: one that refuses is an internal error."""
    if getattr(session.config.option, "numprocesses", None):
        _check_library()


def _check_library() -> None:
    """No test that knows the kernels runs beside a library that can't be used: those of its levels would be missing."""
    from quire.ops.native.library import library_fault

    if (fault := library_fault()) is not None:
        raise pytest.UsageError(fault)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """What is here then stays, and is a million objects: collections of garbage need not look at them, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish() -> None:
    if (interpreter := sys.modules.get("triton.runtime.interpreter")) is not None:
        _patch_language_once(interpreter)


def _patch_language_once(interpreter: Any) -> None:
    """Triton's interpreter patches its language at each call of a kernel's function: once a launch is enough.

    Those calls took half the time of interpreted kernels, and found everything patched.
    """
    language, patch = interpreter.tl, interpreter._patch_lang

    def once(function: Any) -> Any:
        languages = [v for v in function.__globals__.values() if v is language or v is language.core]
        patched = not any(language.core.is_builtin(one.load) for one in languages)
        return interpreter._LangPatchScope() if patched else patch(function)

    interpreter._patch_lang = once


# Or Triton would say that all of it leaked; but no sooner, as pytest collects garbage three times at its own end.
atexit.register(gc.unfreeze)


@pytest.hookimpl(tryfirst=True)  # before those marked slow are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thin out sweeps to the cases in which each two values of their parameters meet.

    The rest of a test marked `pairs` is slow; that of a `sweep` is left out, as is what is marked `nightly`, but of no
    nightly run. Long files come first.
    """
    if "quire.ops.native.library" in sys.modules and "PYTEST_XDIST_WORKER" not in os.environ:
        _check_library()
    for item in _beyond_pairs(items, "pairs"):
        item.add_marker(pytest.mark.slow)
    if os.environ.get("QUIRE_NIGHTLY") != "1":
        left_out = {*_beyond_pairs(items, "sweep")}
        left_out.update(item for item in items if item.get_closest_marker("nightly") is not None)
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.path.name not in _LONG)


def _beyond_pairs(items: list[pytest.Item], marker: str) -> list[pytest.Item]:
    """Cases of the tests with this marker whose pairs of parameters' values all meet in other cases."""
    cases: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker(marker) is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    beyond: list[pytest.Item] = []
    for same in cases.values():
        same.sort(key=lambda item: item.get_closest_marker("nightly") is not None)  # of two that do, the other one
        rows = [{name: repr(value) for name, value in item.callspec.params.items()} for item in same]
        chosen = set(covering(rows))
        beyond += [item for place, item in enumerate(same) if place not in chosen]
    return beyond


@pytest.fixture
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The level of kernels in use; level and number of threads are as before afterwards."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_KERNELS", request.param)
        yield request.param
    torch.set_num_threads(num_threads)
