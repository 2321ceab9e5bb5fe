"""Tokenizers of GGUF files are those of the tokenizer.json that they were converted from: real ones, of both kinds."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ModelLoadError
from quire.text.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf")
sys.path.insert(0, str(Path(__file__).parents[2]))
gguf_files: Any = importlib.import_module("gguf_files")

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data" / "tokenizers"
# Name -> its pre-tokenizer in llama.cpp's terms, and what converters say beside it.
REAL = {
    "gpt2": ("gpt-2", {"add_bos_token": False}),
    "llama-2": ("", {"add_bos_token": True, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}),
    "llama-3": ("llama-bpe", {"add_bos_token": True, "bos_token_id": 128000, "eos_token_id": 128009}),
    "qwen3": ("qwen2", {"add_bos_token": False, "eos_token_id": 151645}),
}
TEXTS = [
    "Once upon a time, there was a little girl.", "  two spaces\n\n\tand\r\n tabs ", "don't WE'LL 1234567 3.14159",
    "naïve café “quoted” 東京 🙂 \u0301", "def f(x):\n    return x ** 2", "a" * 50, "", " ",
    "<|endoftext|> </s> <0x41>",
]  # fmt: skip


def write(path: Path, file: Path, pre: str, change: Any = None, **settings: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if change is not None:
        change(writer)
    gguf_files.add_tokenizer(writer, file, pre, **settings)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if name in ("llama-3", "qwen3") else pytest.mark.slow)
        for name in REAL
    ],
)
def test_a_real_vocabulary(tmp_path: Path, name: str) -> None:
    if not (SHARED / name).is_dir():
        pytest.skip("needs ../shared/data/tokenizers")
    pre, settings = REAL[name]
    theirs = load_tokenizer(SHARED / name)
    ours = load_tokenizer(write(tmp_path / "m.gguf", SHARED / name / "tokenizer.json", pre, **settings))
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


def test_merges_of_tokens_that_are_not_there(tmp_path: Path) -> None:
    file = Path(__file__).parents[2] / "fixtures" / "tokenizers" / "byte_bpe" / "tokenizer.json"

    def change(writer: Any) -> None:
        add = writer.add_token_merges
        writer.add_token_merges = lambda merges: add([*merges, "never seen"])

    path = write(tmp_path / "m.gguf", file, "gpt-2", change)
    with pytest.raises(ModelLoadError, match=r"m\.gguf has a tokenizer whose parts don't fit .*never"):
        load_tokenizer(path)
