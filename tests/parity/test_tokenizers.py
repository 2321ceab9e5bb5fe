"""Tokenizers give what transformers' AutoTokenizer gives: ids, text, facts, and text in increments.

Over the project's own small tokenizers with every rule of tokenizer_config.json that matters, and (slow) the real ones.
"""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from quire.sampling_params import SamplingParams
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.streams import clean_up_spaces
from quire.text.tokenizer import Tokenizer, load_tokenizer

FIXTURES = Path(__file__).parents[1] / "fixtures" / "tokenizers"
REAL = ["gpt2", "llama-2", "llama-3", "mistral-v3", "qwen3"]
NASTY = [
    "",
    " ",
    "  \n\t ",
    "Hello, world",
    " leading",
    "trailing   ",
    "many    spaces\n\n\nand\r\nlines\x0b\x0c",
    "zażółć é e\u0301 ﬁ Ａ ½ ß İ",
    "日本語のテキストと漢字、한국어",
    "👨‍👩‍👧‍👦🏳️‍🌈👍🏽😀",
    "مرحبا بالعالم \u202eabc\u202c שלום",
    "\x00\x01\x1f\x7f\x80\u200b\ufeff",
    "\ufffd \ufffe \U0010ffff",
    "<s> hi </s><unk> [INST] <|endoftext|><|im_start|>user\n<|eot_id|> <pad>",
    "<tool call> a  <mask>b<think></think>",
    "▁▁a ▁ Ġ <0x0A>",
    "I 'm sure it isn 't so , said she . Really ?",
    "1234567890 3.14159 1e-5 0xFF",
    "x" * 1000 + "é" * 300 + " \n" * 200,
]


def compare(ours: Tokenizer, theirs: Any, text: str) -> None:
    for special in (True, False):
        ids = theirs.encode(text, add_special_tokens=special)
        assert ours.encode(text, add_special_tokens=special) == ids
        compare_decode(ours, theirs, ids)


def compare_cut(ours: Tokenizer, theirs: Any, text: str) -> None:
    for side in ("left", "right"):
        theirs.truncation_side = side
        for special in (True, False):
            asked: Any = {"add_special_tokens": special, "truncation": True, "max_length": 4}
            assert ours(text, truncation_side=side, **asked) == dict(theirs(text, **asked))


def compare_decode(ours: Tokenizer, theirs: Any, ids: list[int]) -> None:
    for skip in (True, False):
        text = theirs.decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids, skip_special_tokens=skip) == text
        detokenizer = IncrementalDetokenizer(ours, [], SamplingParams(skip_special_tokens=skip))
        pieces = []
        for token_id in ids:
            detokenizer.update([token_id])
            pieces.append(detokenizer.get_next_output_text(False, True))
        assert "".join(pieces) + detokenizer.get_next_output_text(True, True) == text


def compare_facts(ours: Tokenizer, theirs: Any) -> None:
    assert (len(ours), ours.vocab_size) == (len(theirs), theirs.vocab_size)
    assert ours.get_vocab() == theirs.get_vocab()
    for name in ("bos_token", "eos_token", "bos_token_id", "eos_token_id", "special_tokens_map", "chat_template"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.all_special_tokens == theirs.all_special_tokens
    assert ours.all_special_ids == theirs.all_special_ids
    ids = list(range(0, len(ours) + 3, max(1, len(ours) // 500)))
    assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
    tokens = [token for token in ours.convert_ids_to_tokens(ids) if token is not None]
    assert ours.convert_tokens_to_ids([*tokens, "no such"]) == theirs.convert_tokens_to_ids([*tokens, "no such"])


# Each entry of tokenizer_config.json (or another file) that changes what transformers does, and some that do not.
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "byte_bpe": ("byte_bpe", {}, {}),
    "gpt2_files": ("gpt2_files", {}, {}),
    "sp_bpe": ("sp_bpe", {}, {}),
    "unigram": ("unigram", {}, {}),
    "no_bos_flag": ("sp_bpe", {"add_bos_token": False, "add_eos_token": True}, {}),
    "llama_class": ("sp_bpe", {"tokenizer_class": "LlamaTokenizer"}, {}),
    "llama_fast_class": ("sp_bpe", {"tokenizer_class": "LlamaTokenizerFast", "legacy": False}, {}),
    "llama_legacy": ("sp_bpe", {"tokenizer_class": "LlamaTokenizer", "legacy": True}, {}),
    "llama_no_prefix": ("sp_bpe", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}, {}),
    "llama_prefix": ("sp_bpe", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": True, "legacy": True}, {}),
    "llama_model_type": ("sp_bpe", {"tokenizer_class": "LlamaTokenizer"}, {"model_type": "llama"}),
    "mistral_model_type": ("sp_bpe", {"tokenizer_class": "LlamaTokenizer"}, {"model_type": "mistral"}),
    "mixtral_model_type": ("sp_bpe", {"tokenizer_class": "LlamaTokenizerFast"}, {"model_type": "mixtral"}),
    "no_class": ("sp_bpe", {"tokenizer_class": None}, {"model_type": "llama"}),
    "class_of_config": ("sp_bpe", {"tokenizer_class": None}, {"model_type": "x", "tokenizer_class": "LlamaTokenizer"}),
    "byte_level_llama_class": ("byte_bpe", {"tokenizer_class": "LlamaTokenizerFast"}, {"model_type": "llama"}),
    "unknown_class": ("byte_bpe", {"tokenizer_class": "NoSuchTokenizer"}, {}),
    "gpt2_class": ("byte_bpe", {"tokenizer_class": "GPT2Tokenizer"}, {}),
    "gpt2_prefix": ("byte_bpe", {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True}, {}),
    "generic_prefix": ("byte_bpe", {"add_prefix_space": True}, {}),
    "qwen2_class": ("byte_bpe", {"tokenizer_class": "Qwen2Tokenizer"}, {"model_type": "qwen3"}),
    "qwen2_null_tokens": ("byte_bpe", {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "unk_token": None}, {}),
    "qwen2_model_type": ("byte_bpe", {}, {"model_type": "qwen2"}),
    "qwen2_over_llama_class": ("byte_bpe", {"tokenizer_class": "LlamaTokenizerFast"}, {"model_type": "qwen2"}),
    "qwen3_generic": ("byte_bpe", {}, {"model_type": "qwen3"}),
    "gpt2_model_type": ("byte_bpe", {"tokenizer_class": None}, {"model_type": "gpt2"}),
    "opt_model_type": ("byte_bpe", {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}, {"model_type": "opt"}),
    "opt_no_bos": ("gpt2_files", {"add_bos_token": False}, {}),
    "opt_eos": ("gpt2_files", {"add_eos_token": True}, {}),
    "opt_no_class": ("gpt2_files", {"tokenizer_class": None}, {}),
    "qwen2_files": ("gpt2_files", {"tokenizer_class": "Qwen2Tokenizer"}, {"model_type": "qwen2"}),
    "new_tokens": ("byte_bpe", {"pad_token": "<|new|>", "extra_special_tokens": ["<|x|>", "<think>"]}, {}),
    "model_specific_token": (
        "byte_bpe",
        {"image_token": "<|image|>", "extra_special_tokens": {"a_token": "<|a|>"}},
        {},
    ),
    "named_plain_token": ("byte_bpe", {"eos_token": "<think>"}, {}),
    "added_decoder": (
        "byte_bpe",
        {"added_tokens_decoder": {"448": {"content": "<|bos|>", "special": True, "rstrip": True, "normalized": False}}},
        {},
    ),
    "added_decoder_new": ("sp_bpe", {"added_tokens_decoder": {"600": {"content": "<new>", "lstrip": True}}}, {}),
    "split_special": ("byte_bpe", {"split_special_tokens": True}, {}),
    "clean_up_bpe": ("byte_bpe", {"clean_up_tokenization_spaces": True}, {}),
    "no_clean_up": ("unigram", {"clean_up_tokenization_spaces": False}, {}),
}
EXTRA_FILES = {
    "special_tokens_map": {"special_tokens_map.json": {"eos_token": {"content": "<|eos|>", "lstrip": True}}},
    "more_special": {"special_tokens_map.json": {"additional_special_tokens": ["<|im_end|>", "<|y|>"]}},
    "added_tokens": {"added_tokens.json": {"<|im_end|>": 451, "<extra>": 456}},
    "no_config": {"tokenizer_config.json": None},
}


def copy(tmp_path: Path, name: str, config: dict[str, Any], model: dict[str, Any]) -> Path:
    path = tmp_path / name
    shutil.copytree(FIXTURES / name, path)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    if model:
        (path / "config.json").write_text(json.dumps(model))
    return path


def compare_directory(path: Path) -> None:
    ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(path)
    compare_facts(ours, theirs)
    for text in NASTY:
        compare(ours, theirs, text)


@pytest.mark.parametrize("name", VARIANTS)
def test_rules_of_the_configuration(name: str, tmp_path: Path) -> None:
    compare_directory(copy(tmp_path, *VARIANTS[name]))


@pytest.mark.parametrize("name", EXTRA_FILES)
def test_files_beside_the_configuration(name: str, tmp_path: Path) -> None:
    path = copy(tmp_path, "byte_bpe", {}, {})
    for file, content in EXTRA_FILES[name].items():
        (path / file).unlink(missing_ok=True)
        if content is not None:
            (path / file).write_text(json.dumps(content))
    compare_directory(path)


@cache
def pair(path: Path) -> tuple[Tokenizer, Any]:
    return load_tokenizer(path), AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("name", ["byte_bpe", "gpt2_files", "sp_bpe", "unigram"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_text_and_any_ids(name: str, data: st.DataObject) -> None:
    ours, theirs = pair(FIXTURES / name)
    text = data.draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
    compare(ours, theirs, text)
    compare_cut(ours, theirs, text)
    compare_decode(ours, theirs, data.draw(st.lists(st.integers(0, len(ours) + 3), max_size=25)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=st.text(" .?!,'ntmsvrexyz", max_size=30))
def test_clean_up_of_spaces(text: str) -> None:
    assert clean_up_spaces(text) == PreTrainedTokenizerBase.clean_up_tokenization(None, text)  # type: ignore[arg-type]


def test_applied_chat_template() -> None:
    ours, theirs = pair(FIXTURES / "byte_bpe")
    messages = [{"role": "user", "content": "Hi <|eos|>"}, {"role": "assistant", "content": " there "}]
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        expected = theirs.apply_chat_template(messages, tools=tools, return_dict=False)
        assert ours.apply_chat_template(messages, tools=tools) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers(name: str, shared_data: Path) -> None:
    ours, theirs = pair(shared_data / "tokenizers" / name)
    compare_facts(ours, theirs)
    for text in NASTY:
        compare(ours, theirs, text)
    book = (shared_data / "text" / "tinyshakespeare.txt").read_text()[:20_000]
    compare(ours, theirs, book)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_real_tokenizers_on_any_text(name: str, data: st.DataObject, shared_data: Path) -> None:
    ours, theirs = pair(shared_data / "tokenizers" / name)
    compare(ours, theirs, data.draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=60)))
    compare_decode(ours, theirs, data.draw(st.lists(st.integers(0, len(ours) + 3), max_size=25)))


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_real_tokenizers_continue_prompts(name: str, data: st.DataObject, shared_data: Path) -> None:
    """A text cut anywhere between two tokens: the output is what it adds to the prompt's text."""
    ours, _ = pair(shared_data / "tokenizers" / name)
    ids = ours.encode(data.draw(st.text("ab é日😀.\n", max_size=30)))
    cut = data.draw(st.integers(0, len(ids)))
    before, whole = ours.decode(ids[:cut], True), ours.decode(ids, True)
    if whole.startswith(before):
        detokenizer = IncrementalDetokenizer(ours, ids[:cut], SamplingParams())
        detokenizer.update(ids[cut:])
        assert detokenizer.get_next_output_text(True, True) == whole[len(before) :]


def test_stories260k(shared_data: Path) -> None:
    """The real small model's tokenizer, by tokenizer.json, and its tokenizer.model to the same ids."""
    path = shared_data / "models" / "stories260K"
    ours, theirs = pair(path)
    slow = load_tokenizer(path, "slow")
    for text in NASTY:
        compare(ours, theirs, text)
        # SentencePiece takes extra spaces away, and looks for no special tokens but those of the configuration.
        if text == " ".join(text.split()) and "<" not in text:
            assert slow.encode(text) == ours.encode(text)
            assert slow.decode(ours.encode(text), True) == ours.decode(ours.encode(text), True)
