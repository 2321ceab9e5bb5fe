"""The demo model: what its training script makes of text, one very short training, and the files that are shipped."""

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "tools" / "train_demo.py"
DEMO = ROOT / "quire" / "demo"
TINY = (
    "--vocab 320 --context 32 --hidden 32 --layers 2 --heads 4 --kv-heads 2 --inner 64 --draft-hidden 32 "
    "--draft-layers 1 --rows 4 --micro 2 --threads 1 --minutes 0.02 --no-compile"
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The training script as a module."""
    spec = importlib.util.spec_from_file_location("train_demo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_demo"] = module  # its dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a training of about a second writes."""
    folder = tmp_path_factory.mktemp("demo")
    pages = [
        f'The cat number {i} sat on the mat and looked at the old dog in the garden.\n\n"Who are you?" said the dog.'
        f'\n\n"I am the cat number {i}," said the cat. "I live here."\n\nThen it rained.'
        for i in range(120)
    ]
    text = folder / "text.txt"
    text.write_text("## CHAPTER I\n\n" + "\n\n## CHAPTER II\n\n".join(pages), encoding="utf-8")
    command = [sys.executable, str(SCRIPT), str(text), "--out", str(folder / "out"), *TINY.split()]
    subprocess.run([*command, "--checkpoint", str(folder / "checkpoint")], check=True, capture_output=True, timeout=120)
    return folder / "out"


def test_hard_wrapped_prose_is_joined_and_verse_kept(script: ModuleType) -> None:
    text = (
        "It was a dark night and the captain of the ship stood on the deck\nand looked  at the _sea_ for an hour.\n\n"
        "Twinkle, twinkle,\nLittle star.\n\n* * *\n\n[Illustration: A ship]\n\nThe end.\n"
    )
    assert script.paragraphs(text) == [
        "It was a dark night and the captain of the ship stood on the deck and looked at the sea for an hour.",
        "Twinkle, twinkle,\nLittle star.",
        "The end.",
    ]


def test_boilerplate_and_headings_are_cut(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    start, end = "*** START OF THE BOOK ***", "*** END OF THE BOOK ***"
    path.write_text(
        f"Licence.\n\n{start}\n\nCHAPTER I.\n\n\u201cOne\u201d\n\n# Two\n\nTwo.\n\n{end}\n\nMore.<|endoftext|>Three.",
        encoding="utf-8",
    )
    assert script.read_documents([path]) == [['"One"'], ["Two."], ["Three."]]


@pytest.mark.parametrize(
    ("paragraph", "words"),
    [
        ('"Where are you going?" asked the fox.', "Where are you going?"),
        ('"No," said he. "Go away."', "No. Go away."),
        ('"I think," said she, "that it rains," and she left.', "I think, that it rains."),
        ("He said nothing.", None),
        ('"This speech goes on in the next paragraph.', None),
        ('"Yes," ' + "and he told a long tale of the sea " * 5, None),
    ],
)
def test_speech_loses_its_narration(script: ModuleType, paragraph: str, words: str | None) -> None:
    assert script.spoken(paragraph) == words


def test_neighbouring_speech_becomes_a_chat(script: ModuleType) -> None:
    document = ["It rained.", '"Who is it?"', '"It is I," said the wolf.', "They ate.", '"Alone."']
    (chat,) = script.extract_chats(document, random.Random(3))
    expected = "<|user|>Who is it?<|end|><|assistant|>It is I.<|end|>"
    assert chat.startswith("<|endoftext|>")
    assert chat.endswith(expected)


def test_held_out_text_is_the_end_in_one_piece(script: ModuleType) -> None:
    documents = [["a" * 50, "b" * 40], ["c" * 5, "d" * 5]]
    assert script.hold_out(documents, 0.05) == ([["a" * 50, "b" * 40], ["c" * 5]], [["d" * 5]])


def test_training_windows_begin_with_bos_at_paragraphs(script: ModuleType) -> None:
    text = "One two.\n\nThree four five."
    tokenizer = script.train_tokenizer([text] * 9, 280)
    stream = script.make_stream(tokenizer, [f"<|endoftext|>{text}" * 40])
    rows = next(script.endless_batches(stream, 8, 16, 0))
    assert rows.shape == (8, 17)
    assert (rows[:, 0] == tokenizer.token_to_id("<|endoftext|>")).all()
    assert all(tokenizer.decode(row[1:].tolist()).startswith(("One", "Three")) for row in rows)


@pytest.mark.slow
def test_a_training_leaves_a_model_that_transformers_reads_alike(script: ModuleType, trained: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ids = torch.tensor([[0, 7, 8, 9, 30, 40, 50]])
    for folder in (trained, trained / "draft"):
        other = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            difference = (script.load_model(folder).logits(ids) - other(ids).logits).abs().max()
        assert difference < 1e-4
        assert 0 in other.generation_config.eos_token_id
    card = (trained / "README.md").read_text(encoding="utf-8")
    assert "Validation loss" in card
    assert str(trained.parent) not in card


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["trained", "shipped"])
def test_the_chat_template_writes_what_training_read(script: ModuleType, trained: Path, folder: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained if folder == "trained" else DEMO)
    turns = [{"role": role, "content": role + " speaks"} for role in ("system", "user", "assistant", "user")]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    chat = script.render_chat(["user speaks", "assistant speaks", "user speaks"], "system speaks")
    assert rendered == chat + "<|assistant|>"
    assert tokenizer("Hello").input_ids[0] == tokenizer.bos_token_id == 0
    odd = "caf\u00e9 \u65e5\u672c  two\n\n\nthree 1234 it's "
    assert tokenizer.decode(tokenizer.encode(odd, add_special_tokens=False)) == odd


def test_the_shipped_models_keep_within_their_sizes() -> None:
    draft = sum(path.stat().st_size for path in (DEMO / "draft").rglob("*") if path.is_file())
    everything = sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file())
    assert draft <= 2_000_000
    assert everything - draft <= 16_000_000


def test_the_shipped_models_are_llamas_of_one_tokenizer() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    for folder in (DEMO, DEMO / "draft"):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert config["vocab_size"] == tokenizer.get_vocab_size()
        ends = [tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|end|>")]
        assert config["eos_token_id"] == ends
        generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
        assert generation["eos_token_id"] == ends
