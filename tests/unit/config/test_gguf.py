"""GGUF headers: what they say, and every way in which they can lie."""

import contextlib
import os
import random
import struct
import sys
from pathlib import Path

import pytest

from quire.config.gguf import read_gguf
from quire.config.model import ModelConfig
from quire.errors import ModelLoadError, QuireError

pytest.importorskip("gguf")


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """`shape` as GGUF has it, innermost first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def write(path: Path, entries: list[bytes], tensors: list[bytes], data: int = 0, **head: int) -> Path:
    counts = struct.pack("<QQ", head.get("num_tensors", len(tensors)), head.get("num_entries", len(entries)))
    header = b"GGUF" + struct.pack("<I", head.get("version", 3)) + counts + b"".join(entries) + b"".join(tensors)
    path.write_bytes(header + bytes(-len(header) % 32) + bytes(data))
    return path


HUGE = struct.pack("<Q", 2**60)
BAD = {
    "entries": ([], [], {"num_entries": 2**60}, "'' of the metadata needs 4 bytes"),
    "tensors": ([], [], {"num_tensors": 2**60}, "tensor '' needs 4 bytes"),
    "key": ([HUGE], [], {"num_entries": 1}, "needs 1152921504606846976 bytes"),
    "value": ([entry("a", 8, HUGE)], [], {}, "'a' of the metadata"),
    "texts": ([entry("a", 9, struct.pack("<I", 8) + HUGE)], [], {}, "1152921504606846976 texts"),
    "numbers": ([entry("a", 9, struct.pack("<I", 4) + HUGE)], [], {}, "needs 4611686018427387904 bytes"),
    "lists": ([entry("a", 9, struct.pack("<IQ", 9, 1))], [], {}, "list of values of type 9"),
    "value's type": ([entry("a", 77, b"")], [], {}, "'a' of the metadata has a value of type 77"),
    "key twice": ([entry("a", 7, b"\1")] * 2, [], {}, "is there twice"),
    "alignment": ([entry("general.alignment", 4, b"\3\0\0\0")], [], {}, "no power of two"),
    "version 1": ([], [], {"version": 1}, "version 1; versions 2 and 3"),
    "big-endian": ([], [], {"version": 3 << 24}, "little-endian"),
    "type": ([], [tensor("x", (32,), 99)], {}, "tensor 'x' is of type 99"),
    "dimensions": ([], [tensor("x", (1,) * 5)], {}, "tensor 'x' has 5 dimensions"),
    "no elements": ([], [tensor("x", (0, 4))], {}, "tensor 'x' has the shape"),
    "half a block": ([], [tensor("x", (33, 2), 2)], {}, r"no whole blocks of Q4_0 \(32\)"),
    "offset": ([], [tensor("x", (4,), 0, 2**60)], {}, "tensor 'x' lies at 1152921504606846976"),
    "size": ([], [tensor("x", (2**60, 2**60))], {}, r"tensor 'x' \[.*\] of type F32 ends at"),
    "truncated": ([], [tensor("x", (64,))], {"data": 255}, "of type F32 ends at 320 of 319 bytes"),
    "tensor twice": ([], [tensor("x", (8,)), tensor("x", (8,), 0, 32)], {"data": 64}, "'x' is there twice"),
}


@pytest.mark.parametrize("case", BAD)
def test_lies_are_told_with_file_and_place(tmp_path: Path, case: str) -> None:
    entries, tensors, options, complaint = BAD[case]
    path = write(tmp_path / "bad.gguf", entries, tensors, **options)
    with pytest.raises(ModelLoadError, match=complaint) as caught:
        read_gguf(path)
    assert "bad.gguf" in str(caught.value)


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    entries = [entry("general.architecture", 8, text("llama")), entry("b", 9, struct.pack("<IQII", 4, 2, 1, 2))]
    whole = write(tmp_path / "whole.gguf", entries, [tensor("x", (8, 2))], data=64).read_bytes()
    assert list(read_gguf(tmp_path / "whole.gguf").metadata) == ["general.architecture", "b"]
    path = tmp_path / "cut.gguf"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
            read_gguf(path)


def test_a_file_in_place_of_another_is_read_anew(tmp_path: Path) -> None:
    """Also one of the same size; what is there still is not read twice."""
    path = tmp_path / "m.gguf"
    for second, arch in enumerate(("llama", "qwen2")):
        write(path, [entry("general.architecture", 8, text(arch))], [])
        os.utime(path, (second, second))
        found = read_gguf(path).metadata
        assert found == {"general.architecture": arch}
        assert read_gguf(path).metadata is found


def test_no_gguf_at_all(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(ModelLoadError, match=r"x\.gguf is no GGUF file") as caught:
        read_gguf(tmp_path / "x.gguf")
    assert "PK" not in str(caught.value), "/update_weights may be told of any file"


def test_missing_parts(tmp_path: Path) -> None:
    path = write(tmp_path / "m-00001-of-00003.gguf", [], [])
    write(tmp_path / "m-00003-of-00003.gguf", [], [])
    with pytest.raises(ModelLoadError, match=r"m-00002-of-00003\.gguf is missing"):
        read_gguf(path)
    with pytest.raises(ModelLoadError, match="a part 7 of 3"):
        read_gguf(tmp_path / "m-00007-of-00003.gguf")


def llama(path: Path, arch: str = "llama", **changes: int) -> Path:
    sizes = {"context_length": 64, "embedding_length": 32, "block_count": 1, "feed_forward_length": 64}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2} | changes
    entries = [entry("general.architecture", 8, text(arch))]
    entries += [entry(f"{arch}.{key}", 10, struct.pack("<Q", value)) for key, value in sizes.items()]
    shapes = {"token_embd": (32, 96), "blk.0.attn_norm": (32,), "blk.0.attn_q": (32, 32), "blk.0.ffn_up": (32, 64)}
    tensors, offset = [], 0
    for name, shape in shapes.items():
        tensors.append(tensor(f"{name}.weight", shape, 0, offset))
        offset += 4 * 32 * (shape[1] if len(shape) > 1 else 1)
    return write(path, entries, tensors, data=offset)


def test_sizes(tmp_path: Path) -> None:
    config = ModelConfig.from_pretrained(llama(tmp_path / "m.gguf"))
    assert (config.architecture, config.dtype, config.vocab_size, config.head_dim) == (
        "LlamaForCausalLM",
        "float32",
        96,
        8,
    )
    assert config.tie_word_embeddings
    assert config.max_model_len == 64


def test_a_window_of_no_tokens_is_none(tmp_path: Path) -> None:
    """llama.cpp's converter writes 0 for Phi-4's models, which have no window."""
    sizes = {"attention.sliding_window": 0, "feed_forward_length": 32}
    config = ModelConfig.from_pretrained(llama(tmp_path / "m.gguf", "phi3", **sizes))
    assert config.layer_windows == (None,)


@pytest.mark.parametrize("key", ["embedding_length", "block_count", "feed_forward_length", "attention.head_count"])
@pytest.mark.parametrize("size", [2**60, 7])
def test_sizes_that_the_tensors_contradict(tmp_path: Path, key: str, size: int) -> None:
    path = llama(tmp_path / "m.gguf", "llama", **{key: size})
    with pytest.raises(ModelLoadError, match=r"m\.gguf"):
        ModelConfig.from_pretrained(path)


def test_an_architecture_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="architecture 'mamba', which is not supported; supported are arcee"):
        ModelConfig.from_pretrained(llama(tmp_path / "m.gguf", "mamba"))
    write(path := tmp_path / "list.gguf", [entry("general.architecture", 9, struct.pack("<IQI", 4, 1, 2))], [])
    with pytest.raises(ModelLoadError, match=r"architecture '\[2\]', which is not supported"):
        ModelConfig.from_pretrained(path)


def test_the_package_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf.constants", None)
    with pytest.raises(ModelLoadError, match="pip install gguf"):
        read_gguf(llama(tmp_path / "m.gguf"))


def test_folders(tmp_path: Path) -> None:
    first = llama(tmp_path / "a.gguf")
    assert ModelConfig.from_pretrained(tmp_path).path == first
    llama(tmp_path / "mmproj-a.gguf")
    assert ModelConfig.from_pretrained(tmp_path).path == first
    llama(tmp_path / "b.gguf")
    with pytest.raises(ModelLoadError, match=r"several GGUF models: give one of a\.gguf, b\.gguf"):
        ModelConfig.from_pretrained(tmp_path)


def test_any_damage_is_an_error_by_name_or_harmless(tmp_path: Path) -> None:
    whole = llama(tmp_path / "m.gguf").read_bytes()
    size, rng = whole.index(b"blk.0.ffn_up") + 60, random.Random(0)
    for _ in range(100):
        data = bytearray(whole)
        for place in rng.sample(range(size), rng.choice((1, 1, 3))):
            data[place] = rng.choice((0, 1, 127, 255, data[place] ^ 1 << rng.randrange(8)))
        (tmp_path / "damaged.gguf").write_bytes(data[: rng.choice((len(data), len(data), rng.randrange(len(data))))])
        with contextlib.suppress(QuireError):
            ModelConfig.from_pretrained(tmp_path / "damaged.gguf")
