"""`quire bench spec`: a whole small run on the bundled model, its drafts of a chosen rate, its picture, wrong usage."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from quire.entrypoints.cli.main import main
from quire.entrypoints.cli.speculation.plot import Figures, render
from quire.entrypoints.cli.speculation.replay import ReplayProposer
from quire.speculative.base import DraftedSequence
from tests.tokens import tokens_of

SMALL = ["--max-model-len", "256", "--num-kv-blocks", "64", "--rounds", "1", "--output-len", "24"]


def test_a_run_on_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, plot = tmp_path / "f.json", tmp_path / "f.svg"
    small = [*SMALL, "--num-speculative-tokens", "3", "--batch-sizes", "2", "--acceptance-rates", "0", "1"]
    files = ["--output-json", str(figures), "--plot", str(plot)]
    assert main(["bench", "spec", "demo", *small, *files, "--try", '{"method": "ngram"}']) == 0
    found = json.loads(figures.read_text())["figures"]
    assert [(one["name"], one["text"]) for one in found] == [
        ("synthetic, 0 accepted", "random"),
        ("synthetic, 1 accepted", "random"),
        ("ngram", "copies"),
        ("ngram", "free"),
    ]
    none, all_of_them = found[:2]
    assert none["num_accepted"] == 0
    assert none["tokens_per_step"] == 1.0
    # 2 sequences of 24 tokens: one of the prompt's step, and then 23 in steps of at most 4
    assert all_of_them["num_accepted"] == all_of_them["num_drafted"] == 2 * (23 - 6)
    for one in found:
        assert one["break_even"] == pytest.approx(one["tokens_per_step"] / one["speedup"])
    ElementTree.fromstring(plot.read_text())
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 + 4
    assert "0 of " in printed[1]


@pytest.mark.slow
def test_what_is_bundled_with_the_demo_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each method once; heads that are fewer than the drafts are left out, and said to be."""
    figures, prompts = tmp_path / "f.json", tmp_path / "p.txt"
    prompts.write_text("Once upon a time\n")
    small = [*SMALL, "--num-speculative-tokens", "1", "5", "--batch-sizes", "1", "--acceptance-rates"]
    assert main(["bench", "spec", *small, "--output-json", str(figures), "--dataset", str(prompts)]) == 0
    found = [(one["num_speculative_tokens"], one["name"]) for one in json.loads(figures.read_text())["figures"]]
    heads = ["draft_model, demo-draft", "medusa, demo-medusa", "eagle, demo-eagle", "eagle3, demo-eagle3"]
    assert found == [(k, name) for k in (1, 5) for name in ("ngram", "suffix", *heads) if (k, name) != (5, heads[1])]
    assert "medusa, demo-medusa: nothing with 5 drafts: The heads 'demo-medusa' are 4" in capsys.readouterr().err


def test_trees_and_configurations_that_say_how_many_are_measured_once(tmp_path: Path) -> None:
    figures, prompts = tmp_path / "f.json", tmp_path / "p.txt"
    prompts.write_text("Once upon a time\n")
    small = [*SMALL, "--num-speculative-tokens", "2", "3", "--batch-sizes", "1", "--acceptance-rates"]
    tried = ['{"model": "demo-eagle", "speculative_token_tree": "[(0,), (1,), (0, 0), (0, 1)]"}']
    tried += ['{"method": "ngram", "num_speculative_tokens": 8, "adaptive": false}', '{"model": "demo-medusa"}']
    flags = [flag for config in tried for flag in ("--try", config)]
    assert main(["bench", "spec", *small, "--output-json", str(figures), "--dataset", str(prompts), *flags]) == 0
    found = [(one["num_speculative_tokens"], one["name"]) for one in json.loads(figures.read_text())["figures"]]
    first = [(4, "demo-eagle, tree of 4"), (8, "ngram, adaptive False"), (2, "demo-medusa")]
    assert found == [*first, (3, "demo-medusa")]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--try", "[1]"], "must be a JSON object"),
        (["--try", '{"method": "nigram"}'], "got 'nigram'"),
        (["--acceptance-rates", "1.5"], "--acceptance-rates"),
        (["--num-speculative-tokens", "0"], "at least 1"),
        (["--num-speculative-tokens"], "--num-speculative-tokens: expected at least one"),
        (["--speculative-config", '{"method": "ngram"}'], "--try"),
        (["--dataset", "/nowhere.txt"], "--dataset /nowhere.txt"),
    ],
)
def test_wrong_usage(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["bench", "spec", "demo", *SMALL, *flags])
    except SystemExit as left:
        code = left.code
    assert code == 2
    assert said in capsys.readouterr().err


def test_a_model_that_drafts_and_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "spec", *SMALL, "--acceptance-rates", "--try", '{"model": "/no/such/heads"}']) == 1
    assert "'/no/such/heads' does not exist" in capsys.readouterr().err


def test_replayed_drafts_are_right_at_their_rate() -> None:
    known = {(1, 2): [i % 50 for i in range(4000)], (3,): [7] * 4000}
    proposer = ReplayProposer(4, 0.7, 50, known)
    rows = [DraftedSequence(i, tokens_of(prompt, known[prompt][:9]), max_drafts=4) for i, prompt in enumerate(known)]
    rows[1].max_drafts = 2
    first, second = proposer.propose(rows, torch.empty(0))
    assert (len(first), len(second)) == (4, 2)
    assert first == rows[0].memory[9:13]
    for row, output in zip(rows, known.values(), strict=True):
        share = sum(draft == token for draft, token in zip(row.memory, output, strict=True)) / len(output)
        assert share == pytest.approx(0.7, abs=0.03)
    again = ReplayProposer(4, 0.7, 50, known)
    assert again.propose([DraftedSequence(5, rows[0].tokens, max_drafts=4)], torch.empty(0)) == [first]


def test_the_picture_has_a_panel_for_each_text_and_batch() -> None:
    def figures(name: str, text: str, k: int, batch: int, speedup: float) -> Figures:
        return Figures(name, text, k, batch, 1e-3, 1e-3 * speedup, speedup, speedup, 10, 5, 2.0, 2.0 / speedup)

    found = [figures(name, text, k, 1, k / 2) for name in ("a<b", "c") for text in ("x", "y") for k in (1, 4)]
    found.append(figures("c", "x", 4, 8, 0.5))
    svg = render(found, "model")
    ElementTree.fromstring(svg)
    assert svg.count("<circle") == len(found)
    for title in ("x, batch 1", "y, batch 1", "x, batch 8", "a&lt;b"):
        assert title in svg
