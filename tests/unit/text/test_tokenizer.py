"""Tokenizer and load_tokenizer: files, modes, rules of tokenizer_config.json, errors, threads."""

import contextlib
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError, InvalidRequestError, ModelLoadError, NotYetSupportedError
from quire.text.tokenizer import Tokenizer, load_tokenizer

FIXTURES = Path(__file__).parents[2] / "fixtures" / "tokenizers"


def variant(tmp_path: Path, name: str, *drop: str, **config: Any) -> Path:
    """A copy of a fixture without some files and with entries of tokenizer_config.json changed."""
    path = tmp_path / name
    shutil.copytree(FIXTURES / name, path, dirs_exist_ok=True)
    for file in drop:
        (path / file).unlink()
    if config:
        file = path / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return path


def test_facts_of_a_tokenizer() -> None:
    used = load_tokenizer(FIXTURES / "byte_bpe")
    assert used.is_fast
    assert used.name_or_path == str(FIXTURES / "byte_bpe")
    assert (used.bos_token, used.eos_token) == ("<|bos|>", "<|im_end|>")
    assert used.vocab_size == 448
    assert len(used) == 456
    assert used.bos_token_id == used.convert_tokens_to_ids("<|bos|>") == 448
    assert used.all_special_tokens == ["<|bos|>", "<|im_end|>", "<|im_start|>"]
    assert used.all_special_ids == used.convert_tokens_to_ids(used.all_special_tokens)
    assert used.convert_ids_to_tokens([448, 99999]) == ["<|bos|>", None]
    assert used.convert_tokens_to_ids("no such token") is None
    assert used.get_vocab()["<think>"] == used.convert_tokens_to_ids("<think>")
    assert used.model_max_length == 512
    assert bool(used)
    assert (used.pad_token, used.pad_token_id) == (None, None)
    assert not hasattr(used, "nonsense_id")
    assert load_tokenizer(FIXTURES / "sp_bpe").unk_token_id == 0


def test_encode_and_decode() -> None:
    used = load_tokenizer(FIXTURES / "byte_bpe")
    ids = used.encode("A <|im_end|> b")
    assert ids[0] == used.bos_token_id
    assert used.eos_token_id in ids
    assert used.decode(ids, skip_special_tokens=True) == "A  b"
    assert used.decode(ids) == "<|bos|>A <|im_end|> b", "transformers' default"
    assert used.encode("A", add_special_tokens=False) == ids[1:2]
    assert used.decode(ids[1]) == "A"
    assert used.encode("", add_special_tokens=False) == []
    assert used.decode([]) == ""
    assert used.decode([*ids, 99999], skip_special_tokens=True) == "A  b", "an id that the vocabulary lacks has no text"


def test_a_tokenizer_can_be_called() -> None:
    used = load_tokenizer(FIXTURES / "byte_bpe")
    texts = ["A b", "Some more of it"]
    one, both = used(texts[0]), used(texts)
    assert one.input_ids == one["input_ids"] == used.encode(texts[0])
    assert one.attention_mask == [1] * len(one.input_ids)
    assert dict(both) == {"input_ids": [*map(used.encode, texts)], "attention_mask": both.attention_mask}
    assert [*map(len, both.attention_mask)] == [*map(len, both.input_ids)]
    assert used(texts[0], add_special_tokens=False).input_ids == one.input_ids[1:]
    assert used("a" * 4000, truncation=True).input_ids == used.encode("a" * 4000)[:512]
    assert used.batch_decode(both.input_ids, skip_special_tokens=True) == texts
    assert used.batch_decode(both.input_ids) == ["<|bos|>" + text for text in texts]
    assert used(texts[0], padding=False, return_tensors=None) == one


def test_what_only_transformers_has_is_asked_there() -> None:
    """As scripts of vLLM's call `LLM.get_tokenizer()`."""
    theirs: Any = transformers.AutoTokenizer.from_pretrained(FIXTURES / "byte_bpe")
    used: Any = load_tokenizer(FIXTURES / "byte_bpe")
    texts = ["A b", "Some more of it"]
    used.pad_token = theirs.pad_token = "<|im_end|>"
    used.padding_side = theirs.padding_side = "left"
    assert used.pad_token_id == theirs.pad_token_id == used.convert_tokens_to_ids("<|im_end|>")
    padded = used(texts, padding=True, return_tensors="pt")
    assert padded.input_ids.tolist() == theirs(texts, padding=True).input_ids
    assert padded.attention_mask.tolist()[0][0] == 0
    assert used.encode(texts[1], return_tensors="pt").tolist() == [used.encode(texts[1])]
    assert used.encode(texts[1], truncation=True, max_length=3) == used.encode(texts[1])[:3]
    used.truncation_side = theirs.truncation_side = "left"
    cut: Any = {"truncation": True, "max_length": 4}
    assert used(texts[1], **cut).input_ids == theirs(texts[1], **cut).input_ids
    assert used(texts, return_offsets_mapping=True, **cut) == theirs(texts, return_offsets_mapping=True, **cut)
    assert used(*texts).input_ids == theirs(*texts).input_ids
    assert used.tokenize(texts[0]) == theirs.tokenize(texts[0])
    assert (used.vocab, used.get_added_vocab()) == (theirs.vocab, theirs.get_added_vocab())
    ids = used.encode("A <|im_end|> b")
    assert used.convert_ids_to_tokens(ids, skip_special_tokens=True) == theirs.convert_ids_to_tokens(ids, True)


@pytest.mark.parametrize("wrong", [1.5, [None], [1.5], {"role": "user"}])
def test_what_is_no_text_and_no_ids_is_refused(wrong: Any) -> None:
    used: Any = load_tokenizer(FIXTURES / "byte_bpe")
    for call in (used, used.encode, used.decode, used.convert_ids_to_tokens, used.apply_chat_template):
        if not (call is used and isinstance(wrong, dict)):  # it has texts for keys
            with pytest.raises(InvalidRequestError):
                call(wrong)
    for text in ("x", ["x"]):
        with pytest.raises(InvalidRequestError, match="^ids must be a list of token ids"):
            used.convert_ids_to_tokens(text)
    with pytest.raises(InvalidRequestError, match="^add_special_tokens must be True or False; it is 'no'"):
        used.encode("x", add_special_tokens="no")


def test_chats_as_transformers_has_them() -> None:
    used: Any = load_tokenizer(FIXTURES / "byte_bpe")
    used.pad_token = "<|im_end|>"
    used.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    chats = [[{"role": "user", "content": text}] for text in ("A b", "Some more of it")]
    texts = used.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    assert texts == ["A b:", "Some more of it:"]
    ids = [used.encode(text, add_special_tokens=False) for text in texts]
    asked: Any = {"add_generation_prompt": True}
    assert used.apply_chat_template(chats, **asked) == ids
    assert used.apply_chat_template(chats[0], **asked, return_dict=False, truncation=True, max_length=1) == ids[0][:1]
    assert used.apply_chat_template(chats[0], **asked, return_dict=True).attention_mask == [1] * len(ids[0])
    padded = used.apply_chat_template(chats, **asked, padding=True, return_tensors="pt")
    assert padded[1].tolist() == ids[1]
    assert padded[0].tolist()[: len(ids[0])] == ids[0]


def test_code_that_comes_with_a_tokenizer_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    auto_map = {"AutoTokenizer": [None, "mine.Mine"]}
    path = variant(tmp_path, "byte_bpe", tokenizer_class="Mine", auto_map=auto_map)
    (path / "mine.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    used = load_tokenizer(path)
    assert used.encode("A") == load_tokenizer(FIXTURES / "byte_bpe").encode("A")
    with contextlib.suppress(AttributeError):
        used.tokenize("A")
    assert not Path("ran").exists()


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    used = load_tokenizer(FIXTURES / "byte_bpe")
    with pytest.raises(NotYetSupportedError, match=r"^return_tensors is left to transformers' .* pip install it\.$"):
        used("A", return_tensors="pt")
    with pytest.raises(AttributeError, match="^tokenize is left to transformers'"):
        used.tokenize("A")
    assert not hasattr(used, "nonsense")


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.text(max_size=30))
def test_byte_level_keeps_any_text(text: str) -> None:
    used = load_tokenizer(FIXTURES / "gpt2_files")
    assert used.decode(used.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


def test_text_that_is_none() -> None:
    used = load_tokenizer(FIXTURES / "sp_bpe")
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        used.encode("a\ud800")
    with pytest.raises(InvalidRequestError, match="int"):
        used.encode(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["auto", "slow"])
@pytest.mark.parametrize("token_id", [-1, 1 << 32, 1.5, "a"])
def test_ids_that_are_none(token_id: Any, mode: str) -> None:
    with pytest.raises(InvalidRequestError, match="integers from 0"):
        load_tokenizer(FIXTURES / "sp_bpe", mode).decode([5, token_id])


def test_bos_and_eos_without_tokenizer_json(tmp_path: Path) -> None:
    """add_bos_token and add_eos_token count where no tokenizer.json has a post-processor."""
    used = load_tokenizer(FIXTURES / "gpt2_files")
    assert used.encode("a")[0] == used.bos_token_id == used.convert_tokens_to_ids("</s>")
    both = load_tokenizer(variant(tmp_path, "gpt2_files", add_eos_token=True))
    assert both.encode("a") == [*used.encode("a"), used.eos_token_id]
    none = load_tokenizer(variant(tmp_path, "gpt2_files", add_bos_token=False, add_eos_token=False))
    assert none.encode("a") == used.encode("a")[1:]


def test_tokenizer_json_decides_on_bos(tmp_path: Path) -> None:
    path = variant(tmp_path, "sp_bpe", add_bos_token=False, add_eos_token=True)
    assert load_tokenizer(path).encode("The") == load_tokenizer(FIXTURES / "sp_bpe").encode("The")


def test_class_of_llama(tmp_path: Path) -> None:
    """LlamaTokenizer puts its space before the first segment only, unless legacy."""
    text = "The<s>The"

    def tokens(**config: Any) -> list[str | None]:
        used = load_tokenizer(variant(tmp_path, "sp_bpe", **config))
        return used.convert_ids_to_tokens(used.encode(text, add_special_tokens=False))

    assert tokens() == ["▁The", "<s>", "▁The"]
    assert tokens(tokenizer_class="LlamaTokenizerFast", legacy=True) == ["▁The", "<s>", "▁The"]
    modern = tokens(tokenizer_class="LlamaTokenizer")
    assert modern[:2] == ["▁The", "<s>"]
    assert modern[2] != "▁The"
    assert tokens(tokenizer_class="LlamaTokenizer", add_prefix_space=False)[0] != "▁The"


def test_special_tokens_that_the_vocabulary_lacks_are_added(tmp_path: Path) -> None:
    path = variant(tmp_path, "byte_bpe", pad_token="<|pad|>", extra_special_tokens=["<|x|>"])
    used = load_tokenizer(path)
    assert len(used) == 458
    assert used.encode("<|x|>", add_special_tokens=False) == [457]
    assert used.special_tokens_map["pad_token"] == "<|pad|>"
    assert used.decode([457], skip_special_tokens=True) == ""


def test_slow_mode_equals_tokenizer_json() -> None:
    slow = load_tokenizer(FIXTURES / "sp_bpe", "slow")
    fast = load_tokenizer(FIXTURES / "sp_bpe")
    assert not slow.is_fast
    assert (len(slow), slow.vocab_size, slow.get_vocab()) == (len(fast), fast.vocab_size, fast.get_vocab())
    assert slow.all_special_ids == fast.all_special_ids == [1, 2, 0]
    for text in ("", "The water is warm", "  two  spaces ", "é日😀\n\tx", "a\x00b", "x" * 200, "1234 twenty-one"):
        ids = fast.encode(text)
        assert slow.encode(text) == ids
        for skip in (True, False):
            assert slow.decode(ids, skip) == fast.decode(ids, skip)
    assert slow.decode([200, 300, 99999, 1]) == fast.decode([200, 300, 99999, 1])


def test_slow_mode_finds_special_tokens(tmp_path: Path) -> None:
    slow = load_tokenizer(variant(tmp_path, "sp_bpe", extra_special_tokens=["<|x|>"]), "slow")
    ids = slow.encode("The</s>water<|x|>")
    assert ids[0] == 1
    assert ids.count(2) == 1
    assert ids[-1] == slow.vocab_size == 512
    assert len(slow) == 513
    assert slow.decode(ids, skip_special_tokens=False) == "<s> The</s>water<|x|>"
    assert slow.decode(ids, skip_special_tokens=True) == "Thewater"
    (tmp_path / "sp_bpe" / "added_tokens.json").write_text('{"<y>": 700, "</s>": 2}')
    given = load_tokenizer(tmp_path / "sp_bpe", "slow")
    assert given.encode("<y>", add_special_tokens=False) == [700]
    assert given.encode("<|x|></s>", add_special_tokens=False) == [701, 2]
    legacy = load_tokenizer(variant(tmp_path, "sp_bpe", legacy=True, add_bos_token=False), "slow")
    assert legacy.decode(legacy.encode("The</s>water"), skip_special_tokens=False) == "The</s> water"


def test_tokenizer_model_alone(tmp_path: Path) -> None:
    path = variant(tmp_path, "sp_bpe", "tokenizer.json", "tokenizer_config.json")
    used = load_tokenizer(path)
    assert not used.is_fast
    assert used.encode("The") == load_tokenizer(FIXTURES / "sp_bpe").encode("The")


def test_without_the_sentencepiece_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ModelLoadError, match="install it with pip install sentencepiece"):
        load_tokenizer(FIXTURES / "sp_bpe", "slow")
    load_tokenizer(FIXTURES / "sp_bpe")


def test_mistral_mode(tmp_path: Path) -> None:
    assert load_tokenizer(FIXTURES / "byte_bpe", "mistral").encode("a")
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(NotYetSupportedError, match="tekken"):
        load_tokenizer(tmp_path, "mistral")


def test_vllms_name_for_the_default_mode() -> None:
    ids = load_tokenizer(FIXTURES / "byte_bpe").encode("a b")
    assert load_tokenizer(FIXTURES / "byte_bpe", "hf").encode("a b") == ids


def test_unknown_mode() -> None:
    with pytest.raises(ConfigError, match="'fancy'.*'auto', 'slow' or 'mistral'"):
        load_tokenizer(FIXTURES / "byte_bpe", "fancy")


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no tokenizer file"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.model"):
        load_tokenizer(FIXTURES / "byte_bpe", "slow")
    with pytest.raises(ModelLoadError, match="no tokenizer directory"):
        load_tokenizer(tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "file", "content"),
    [
        ("byte_bpe", "tokenizer.json", "{"),
        ("byte_bpe", "tokenizer.json", '{"model": 5}'),
        ("byte_bpe", "tokenizer_config.json", "not json"),
        ("byte_bpe", "tokenizer_config.json", "[1]"),
        ("byte_bpe", "tokenizer_config.json", '{"added_tokens_decoder": {"0": 5}}'),
        ("byte_bpe", "tokenizer_config.json", '{"added_tokens_decoder": []}'),
        ("byte_bpe", "tokenizer_config.json", '{"bos_token": {"text": "x"}}'),
        ("byte_bpe", "tokenizer_config.json", '{"extra_special_tokens": 5}'),
        ("byte_bpe", "special_tokens_map.json", "\x00"),
        ("byte_bpe", "added_tokens.json", "{"),
        ("gpt2_files", "vocab.json", "[]"),
        ("gpt2_files", "merges.txt", "a b c d"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, file: str, content: str) -> None:
    path = variant(tmp_path, name)
    (path / file).write_text(content)
    with pytest.raises(ModelLoadError, match=file.split(".")[0]) as caught:
        load_tokenizer(path)
    assert str(tmp_path) not in str(caught.value), "an error shows no path"


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x0a\x0e" + b"\xff" * 40])
def test_broken_sentencepiece_model(tmp_path: Path, content: bytes) -> None:
    path = variant(tmp_path, "sp_bpe", "tokenizer.json")
    (path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.model"):
        load_tokenizer(path)


def test_chat_template_files(tmp_path: Path) -> None:
    used = load_tokenizer(FIXTURES / "byte_bpe")
    assert isinstance(used.chat_template, dict)
    assert sorted(used.chat_template) == ["default", "tool_use"]
    named = load_tokenizer(FIXTURES / "unigram")
    assert isinstance(named.chat_template, dict)
    assert sorted(named.chat_template) == ["default", "rag"]
    assert load_tokenizer(FIXTURES / "sp_bpe").chat_template is None
    path = variant(tmp_path, "sp_bpe", chat_template="in config")
    assert load_tokenizer(path).chat_template == "in config"
    (path / "chat_template.jinja").write_text("in a file")
    assert load_tokenizer(path).chat_template == "in a file"
    other = variant(tmp_path / "b", "sp_bpe")
    (other / "chat_template.json").write_text('{"chat_template": "in json"}')
    assert load_tokenizer(other).chat_template == "in json"


def test_apply_chat_template() -> None:
    used = load_tokenizer(FIXTURES / "byte_bpe")
    messages = [{"role": "user", "content": "Hi"}]
    text = used.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert used.apply_chat_template(messages, add_generation_prompt=True) == used.encode(text, add_special_tokens=False)
    tool = {"type": "function", "function": {"name": "f"}}
    with_tools = used.apply_chat_template(messages, tools=[tool], tokenize=False)
    assert with_tools.startswith('<|bos|>[{"type": "function", "function": {"name": "f"}}]\n<|im_start|>user')
    assert used.apply_chat_template(messages, chat_template="{{ eos_token }}", tokenize=False) == "<|im_end|>"
    assert used.apply_chat_template(messages, chat_template="tool_use", tokenize=False).startswith("<|bos|>")
    thinking = used.apply_chat_template(messages, chat_template="{{ think }}", tokenize=False, think=False)
    assert thinking == "False"


@pytest.mark.parametrize(("name", "mode"), [("byte_bpe", "auto"), ("sp_bpe", "slow")])
def test_threads_share_one(name: str, mode: str) -> None:
    used: Tokenizer = load_tokenizer(FIXTURES / name, mode)
    texts = [f"The river {i} is wide, {i * 7} 😀 <s>" * 20 for i in range(16)]
    expected = [used.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(used.encode, texts * 8)) == expected * 8
        assert list(pool.map(used.decode, expected * 8)) == [used.decode(ids) for ids in expected] * 8


def test_imports_nothing_heavy() -> None:
    code = (
        "import sys, quire.text.tokenizer, quire.text.detokenizer, quire.text.template;"
        "print([m for m in ('torch', 'transformers', 'sentencepiece', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
