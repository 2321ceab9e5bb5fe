"""Beam search against transformers' on tiny random models: tokens and scores, for every width, penalty and rule."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

from quire import LLM, SamplingParams
from quire.outputs import RequestOutput

sys.path.append(str(Path(__file__).parent))
tiny: Any = importlib.import_module("tiny_models")

PROMPTS = [[5, 9, 33, 7, 21, 60, 8], [14], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19], [70, 71, 72]]
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LLM]:
    return make_pair("llama", tmp_path_factory.mktemp("beams"))


def make_pair(name: str, home: Path) -> tuple[Any, LLM]:
    """A model that ends often enough for beams of all lengths, theirs and ours."""
    theirs = tiny.build_theirs(name)
    theirs.lm_head.weight.data[[2, 40, 41]] *= 1.6  # what ends is likely now and then
    theirs.generation_config.eos_token_id = None
    directory = tiny.save(theirs, home / name)
    ours = LLM(
        str(directory),
        skip_tokenizer_init=True,
        dtype="float32",
        num_kv_blocks=400,
        block_size=4,
        max_num_seqs=32,
        show_progress=False,
        debug=True,
    )
    return theirs, ours


def their_search(
    theirs: Any, prompts: list[list[int]], width: int, stops: list[int], **options: Any
) -> list[list[tuple[list[int], float]]]:
    """(output tokens, score) of all `width` sequences of each prompt, padded on the left to one batch."""
    config = GenerationConfig(
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=options.pop("max_tokens", MAX_TOKENS),
        do_sample=False,
        eos_token_id=stops or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    found = theirs.generate(ids, attention_mask=mask, generation_config=config)
    sequences: list[tuple[list[int], float]] = []
    for row, places, score in zip(found.sequences, found.beam_indices, found.sequences_scores, strict=True):
        length = int((places >= 0).sum())
        sequences.append((row[longest : longest + length].tolist(), float(score)))
    return [sequences[i : i + width] for i in range(0, len(sequences), width)]


def our_search(ours: LLM, width: int, stops: list[int], **options: Any) -> list[RequestOutput]:
    params = SamplingParams(
        n=width,
        use_beam_search=True,
        temperature=0.0,
        max_tokens=options.pop("max_tokens", MAX_TOKENS),
        ignore_eos=True,
        stop_token_ids=stops,
        detokenize=False,
        **options,
    )
    outputs = ours.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    ours.llm_engine.check_integrity()
    return outputs


def check(pair: tuple[Any, LLM], width: int, stops: list[int], **options: Any) -> set[str | None]:
    """All prompts at once against one after the other; returns why outputs ended."""
    theirs, ours = pair
    renamed = {"min_new_tokens" if name == "min_tokens" else name: value for name, value in options.items()}
    penalty = options.get("length_penalty", 1.0)
    ends: set[str | None] = set()
    for prompt, output in zip(PROMPTS, our_search(ours, width, stops, **options), strict=True):
        (expected,) = their_search(theirs, [prompt], width, stops, **renamed)
        found = [(part.token_ids, part.cumulative_logprob) for part in output.outputs]
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        for (tokens, score), (_, their_score) in zip(found, expected, strict=True):
            assert score is not None
            assert score / len(tokens) ** penalty == pytest.approx(their_score, rel=1e-5, abs=1e-4)
        for part in output.outputs:
            assert (part.finish_reason == "stop") == (part.token_ids[-1] in stops)
            ends.add(part.finish_reason)
    return ends


@pytest.fixture
def always_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    """For transformers one beam is greedy decoding, unless it is told otherwise."""
    monkeypatch.setattr(GenerationConfig, "get_generation_mode", lambda *args, **kwargs: GenerationMode.BEAM_SEARCH)


EARLY: list[bool | str] = [False, True, "never"]


@pytest.mark.parametrize(
    ("width", "penalty", "early"), [(1, 1.0, False), (2, 0.6, True), (5, 2.0, "never"), (8, 0.0, False)]
)
def test_some_of_each(pair, always_beams, width: int, penalty: float, early: bool | str) -> None:
    check(pair, width, [2, 40], length_penalty=penalty, early_stopping=early)


@pytest.mark.slow
@pytest.mark.parametrize("early_stopping", EARLY)
@pytest.mark.parametrize("width", range(1, 9))
def test_widths_and_early_stopping(pair, always_beams, width: int, early_stopping: bool | str) -> None:
    check(pair, width, [2, 40], early_stopping=early_stopping)


@pytest.mark.slow
@pytest.mark.parametrize("early_stopping", EARLY)
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.6, 2.0])
def test_length_penalties(pair, length_penalty: float, early_stopping: bool | str) -> None:
    check(pair, 4, [2, 40, 41], length_penalty=length_penalty, early_stopping=early_stopping)


def test_both_kinds_of_ends_are_met(pair) -> None:
    assert check(pair, 5, [2, 40, 41]) == {"stop", "length"}


@pytest.mark.parametrize("stops", [[], [2], list(range(30, 60))])
def test_stop_tokens(pair, stops: list[int]) -> None:
    check(pair, 3, stops)


def test_min_tokens(pair) -> None:
    check(pair, 4, [2, 40, 41], min_tokens=6)


def test_one_padded_batch_of_theirs(pair) -> None:
    theirs, ours = pair
    expected = their_search(theirs, PROMPTS, 3, [2, 40])
    found = our_search(ours, 3, [2, 40])
    assert [[tokens for tokens, _ in beams] for beams in expected] == [[p.token_ids for p in o.outputs] for o in found]


def test_n_best_of_the_beams(pair) -> None:
    _, ours = pair
    several = our_search(ours, 4, [2, 40])
    best = our_search(ours, 2, [2, 40], best_of=4)
    for many, few in zip(several, best, strict=True):
        assert [part.token_ids for part in few.outputs] == [part.token_ids for part in many.outputs[:2]]
        assert [part.index for part in few.outputs] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "gemma2", "mixtral", "gpt2"])
def test_other_families(name: str, tmp_path: Path) -> None:
    """Windows among them: what they leave behind is no longer shared."""
    ours_and_theirs = make_pair(name, tmp_path)
    for width in (2, 5):
        check(ours_and_theirs, width, [2, 40], max_tokens=40)
