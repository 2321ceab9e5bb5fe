"""Finding the compiled kernels and choosing their level: what is missing or wrong means plain torch, and says so."""

import _ctypes
import ctypes
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.ops.native import library, structs
from quire.ops.native.library import TORCH, Target, choose_level, default_target, levels, operation_names

ROOT = Path(__file__).parents[3]

load_anew = library.library.__wrapped__  # the function itself remembers its answer


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger=library.__name__)
    return lambda: caplog.text


@pytest.fixture
def compiled() -> None:
    if library.library() is None:
        pytest.skip("needs the compiled kernels")


def test_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, messages) -> None:
    monkeypatch.setenv("QUIRE_NATIVE_LIBRARY", str(tmp_path / "absent.so"))
    assert load_anew() is None
    assert "no compiled kernels (absent.so): plain torch is used" in messages()


def test_a_file_that_is_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, messages) -> None:
    (tmp_path / "broken.so").write_bytes(b"\x7fELF, but not really")
    monkeypatch.setenv("QUIRE_NATIVE_LIBRARY", str(tmp_path / "broken.so"))
    assert load_anew() is None
    assert "can't be loaded" in messages()
    assert "reinstall Quire" in messages()


def test_a_library_of_another_version(compiled: None, monkeypatch: pytest.MonkeyPatch, messages) -> None:
    monkeypatch.setattr(library, "ABI_VERSION", 10**6)
    assert load_anew() is None
    assert "of another version of Quire" in messages()
    monkeypatch.setenv("QUIRE_NATIVE_LIBRARY", _ctypes.__file__)  # none of Quire's at all
    assert load_anew() is None
    assert "can't be loaded" in messages()


def test_functions_have_the_types_that_csrc_declares(compiled: None) -> None:
    """Each tells of itself where it is defined, and nothing else names it."""
    found = library.loaded_library()
    assert found.quire_prefault.restype is None
    assert found.quire_prefault.argtypes == [ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64]
    assert (found.quire_level.restype, found.quire_level.argtypes) == (ctypes.c_char_p, [ctypes.c_int32])
    assert (found.quire_abi_version.restype, found.quire_abi_version.argtypes) == (ctypes.c_int32, [])
    assert found.quire_bare_loop.restype is ctypes.c_double
    called = "".join(path.read_text() for path in (ROOT / "quire").rglob("*.py"))
    for name in set(re.findall(r"\.(quire_[a-z_]+)\(", called)):
        assert getattr(found, name).argtypes is not None, f"{name} is not told of"


def test_in_a_checkout_a_library_that_cannot_be_used_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("QUIRE_KERNELS", raising=False)
    monkeypatch.setenv("QUIRE_NATIVE_LIBRARY", str(tmp_path / "broken.so"))
    monkeypatch.setattr(library, "library", load_anew)
    monkeypatch.setattr(library, "levels", levels.__wrapped__)
    assert library.library_fault() is None  # there is none
    assert choose_level() == TORCH
    (tmp_path / "broken.so").write_bytes(b"\x7fELF, but not really")
    with pytest.raises(ConfigError, match="can't be loaded .* run `make native`.*; kernels='torch' does without them"):
        choose_level()
    assert choose_level(TORCH) == TORCH
    monkeypatch.setattr(library, "_IS_CHECKOUT", False)
    assert choose_level() == TORCH


@pytest.mark.slow
def test_no_test_runs_beside_a_library_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(b"\x7fELF, but not really")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", str(Path(__file__))]
    environment = os.environ | {"QUIRE_NATIVE_LIBRARY": str(tmp_path / "broken.so")}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    assert "run `make native`" in done.stderr


def test_levels(compiled: None, level: str) -> None:
    assert levels()[-2:] == ["portable", TORCH]
    assert default_target() == Target(level, 1)
    assert default_target().kernels
    with pytest.raises(ConfigError, match="kernels='neon' can't be used on this machine; it has amx|it has "):
        _ = Target("neon").kernels


def test_torch_has_no_kernels_but_sampling_and_packing_have(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_KERNELS", TORCH)
    assert default_target().level == levels()[0]
    with pytest.raises(ConfigError, match="kernels='torch' can't be used on this machine"):
        _ = Target(TORCH).kernels


def test_choosing_a_level(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_KERNELS", raising=False)
    assert choose_level() == levels()[0]
    assert choose_level("portable") == "portable"
    monkeypatch.setenv("QUIRE_KERNELS", "portable")
    assert choose_level() == "portable"
    assert choose_level(TORCH) == TORCH
    monkeypatch.setenv("QUIRE_KERNELS", "avx1024")
    with pytest.raises(ConfigError, match=r"kernels='avx1024' can't be used .*; it has auto, .*portable, torch"):
        choose_level()


def test_without_the_library_there_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library", lambda: None)
    assert levels.__wrapped__() == [TORCH]
    with pytest.raises(ConfigError, match="kernels='portable' can't be used"):
        _ = library._kernels.__wrapped__("portable")


def test_structs_are_made_as_the_library_has_them(compiled: None) -> None:
    """Every struct, each field at its place: what ctypes lays out is what the compiler did."""
    for name, fields in structs.compiled_fields().items():
        made = structs.c_struct(name)
        assert ctypes.sizeof(made) == fields[""].size
        for field, place in fields.items():
            if field:
                assert (getattr(made, field).offset, getattr(made, field).size) == (place.offset, place.size), field
    assert {"StepArgs", "SampleArgs", "linear"} <= structs.compiled_fields().keys()


def _types(name: str) -> dict[str, Any]:
    fields: Any = structs.c_struct(name)._fields_
    return dict(fields)


def test_fields_have_the_types_that_csrc_declares(compiled: None) -> None:
    assert _types("norm") == {
        "weight": ctypes.c_void_p,
        "bias": ctypes.c_void_p,
        "size": ctypes.c_int64,
        "eps": ctypes.c_float,
        "subtract_mean": ctypes.c_int32,
        "plus_one": ctypes.c_int32,
    }
    assert _types("linear")["weight"] is structs.c_struct("Matrix")
    assert _types("Instruction")["inputs"] is ctypes.c_int32 * 4
    assert _types("SampleArgs")["rows"] is ctypes.c_char_p


def test_a_field_that_the_library_lacks_is_named(compiled: None) -> None:
    with pytest.raises(AttributeError, match="limit"):
        structs.c_struct("Buffer")(width=1, limit=2)
    buffer = structs.c_struct("Buffer")(width=1)
    with pytest.raises(AttributeError, match="limit"):
        buffer.limit = 2


@pytest.mark.parametrize(("field", "offset"), [("type", 12), ("bound", 8)])
def test_a_field_elsewhere_is_named(compiled: None, monkeypatch: pytest.MonkeyPatch, field: str, offset: int) -> None:
    found = structs.compiled_fields()["Buffer"]
    moved = structs._Field(found[field].of, found[field].name, found[field].kind, offset, found[field].size)
    monkeypatch.setitem(structs.compiled_fields(), "Buffer", found | {field: moved})
    with pytest.raises(AssertionError, match=f"Buffer.{field} lies where C would not have it"):
        structs.c_struct.__wrapped__("Buffer")


def test_every_operation_of_the_library_has_a_struct(compiled: None) -> None:
    """And is recorded somewhere in quire/ops, by name."""
    recorded = "".join(path.read_text() for path in (ROOT / "quire" / "ops").rglob("*.py"))
    for name in operation_names():
        assert ctypes.sizeof(structs.c_struct(name)) > 0
        assert f'append("{name}"' in re.sub(r"append\(\s+", "append(", recorded), name


def test_an_operation_that_the_library_lacks_is_named(compiled: None) -> None:
    with pytest.raises(KeyError, match="mirror"):
        structs.c_struct("mirror")


def test_an_operation_is_named_in_its_files_and_one_list() -> None:
    """The machinery of programs names none: a new operation is its two files and a line for each of them."""
    headers = {path.name: path.read_text() for path in (ROOT / "csrc").glob("*.h")}
    names = {m[1]: file for file, text in headers.items() for m in re.finditer(r"^QUIRE_OPERATION\((\w+)", text, re.M)}
    assert {"linear", "prepare", "softcap"} <= names.keys()
    listed = re.findall(r'^#include "(\S+)"$', headers["ops.h"], re.M)
    assert sorted(listed) == sorted(names.values())
    for name in ("operation.h", "program.h", "program.cpp", "layout.cpp", "level.cpp", "kernels.h"):
        code = re.sub("//.*", "", (ROOT / "csrc" / name).read_text())
        assert not [word for word in names if re.search(rf"\b{word}\b", code)], name


@pytest.mark.parametrize(("header", "name"), [("block_format.h", "Type"), ("kernels.h", "Epilogue")])
def test_an_enumeration_has_the_names_of_csrc_in_their_order(header: str, name: str) -> None:
    """Written there once more, as they are used, and read by a type checker, where no library is, too."""
    text = re.sub("//.*", "", (ROOT / "csrc" / header).read_text())
    found = re.search(rf"enum class {name} : int32_t {{([^}}]*)}};", text)
    assert found is not None
    names = [part.partition("=")[0].strip().upper() for part in found[1].split(",") if part.strip()]
    assert names == [member.name for member in getattr(structs, name)]
    assert [member.value for member in getattr(structs, name)] == list(range(len(names)))
