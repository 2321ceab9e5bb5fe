"""A draft model's rounds in one native call, against the same rounds step by step."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.models.compiled import CompiledModel
from quire.ops.native.library import library
from quire.utils.hub import resolve_model_path
from quire.worker.draft import DraftModelProposer

PROMPTS = ["Once upon a time", "The captain said that the boat", "It was", "Nobody in the village knew why"]


def drafts_of(
    monkeypatch: pytest.MonkeyPatch, model: str = "demo-draft", **options: Any
) -> list[Sequence[Sequence[int]]]:
    """What a draft model proposes, step by step, to sequences of all kinds."""
    found: list[Sequence[Sequence[int]]] = []
    propose = DraftModelProposer.propose

    def recorded(self: DraftModelProposer, *args: Any) -> Sequence[Sequence[int]]:
        found.append(propose(self, *args))
        return found[-1]

    config = {"method": "draft_model", "model": model, "num_speculative_tokens": 4, "adaptive": False}
    with monkeypatch.context() as patch:
        patch.setattr(DraftModelProposer, "propose", recorded)
        llm = LLM("demo", speculative_config=config, num_kv_blocks=64, max_model_len=256, **options)
        params = [
            SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
            SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=13, ignore_eos=True),
            SamplingParams(temperature=1.0, seed=4, max_tokens=16, logit_bias={17: 3.0}, ignore_eos=True),
            SamplingParams(temperature=0.0, max_tokens=20, repetition_penalty=1.2, logprobs=2, ignore_eos=True),
        ]
        llm.generate(PROMPTS, params, use_tqdm=False)
    return found


@pytest.mark.skipif(library() is None, reason="no compiled kernels")
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8, "max_num_seqs": 4, "block_size": 16}])
def test_native_rounds_draft_what_rounds_in_steps_do(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    natively = drafts_of(monkeypatch, **options)
    monkeypatch.setattr(CompiledModel, "rounds", lambda self, caches: None)
    assert natively == drafts_of(monkeypatch, **options)
    assert sum(len(drafts) for step in natively for drafts in step) > 40


@pytest.mark.skipif(library() is None, reason="no compiled kernels")
def test_windows_are_a_kv_group_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = drafts_of(monkeypatch)
    model = shutil.copytree(resolve_model_path("demo-draft"), tmp_path / "draft")
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 512}
    (model / "config.json").write_text(json.dumps(config))
    assert drafts_of(monkeypatch, str(model)) == plain
