"""EAGLE heads that don't fit the model are refused by name; what a head has yet to read is kept in order."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM
from quire.config.draft_tree import DraftTree
from quire.config.engine_args import EngineArgs
from quire.config.worker import WorkerConfig
from quire.errors import ConfigError, QuireError
from quire.models.held_states import HeldStates
from quire.utils.hub import resolve_model_path
from quire.worker.worker import Worker


def start(folder: Path, method: str = "eagle", **others: Any) -> Worker:
    speculative = {"method": method, "model": str(folder), "num_speculative_tokens": 3, **others}
    config = EngineArgs("demo", speculative_config=speculative).resolve()
    worker = Worker(
        WorkerConfig(
            config.model, 16, 4, 64, max_num_drafts=3, speculative=config.speculative, draft=config.draft,
            weight_cache=False,
        )
    )  # fmt: skip
    worker.load(progress=False)
    return worker


def changed(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, Tensor | None], bundled_name: str = "demo-eagle"
) -> Path:
    """The bundled head with other entries and tensors."""
    bundled, folder = resolve_model_path(bundled_name), tmp_path / "head"
    shutil.copytree(bundled, folder)
    stated = json.loads((bundled / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(stated))
    held = {**load_file(bundled / "model.safetensors"), **tensors}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"vocab_size": 4000}, {}, "is for a vocabulary of 4000, and the model 'demo' has one of 4096"),
        ({"hidden_size": 128}, {}, "is for a hidden size of 128, and the model 'demo' has one of 256"),
        ({"target_hidden_size": 64}, {}, "is for a hidden size of 64"),
        ({"sliding_window": 9, "model_type": "mistral"}, {}, "has a sliding window, which is not supported yet"),
        ({"intermediate_size": 100}, {}, "mlp.*proj.weight.*config.json and the tensors don't belong together"),
        ({}, {"layers.0.self_attn.k_proj.weight": None}, "lack 1 tensors: layers.0.self_attn.k_proj.weight"),
        ({}, {"layers.1.self_attn.k_proj.weight": torch.ones(2)}, "have a tensor 'layers.1.self_attn.k_proj.weight'"),
        ({"num_attention_heads": "two"}, {}, "num_attention_heads = 'two'"),
    ],
)
def test_heads_of_another_model_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, Tensor | None], message: str
) -> None:
    with pytest.raises(QuireError, match=message):
        start(changed(tmp_path, config, tensors))


@pytest.mark.parametrize(
    ("layers", "message"),
    [([1, 2, 6], r"reads the layers \[1, 2, 6\] .* has layers 1 to 5"), ([0, 1, 2], "layers 1 to 5"), ("all", "'all'")],
)
def test_layers_that_the_model_lacks_are_refused(tmp_path: Path, layers: Any, message: str) -> None:
    head = changed(tmp_path, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": layers}}, {}, "demo-eagle3")
    with pytest.raises(QuireError, match=message):
        start(head, "eagle3")


@pytest.mark.parametrize(
    ("method", "bundled", "held", "fitting"),
    [
        ("eagle3", "demo-eagle", "an EAGLE head", "eagle"),
        ("eagle", "demo-eagle3", "an EAGLE-3 head", "eagle3"),
        ("eagle", "demo-medusa", "Medusa heads", "medusa"),
        ("eagle3", "demo-draft", "a model", "draft_model"),
        ("eagle", "demo", "a model", "draft_model"),
        ("medusa", "demo-eagle", "an EAGLE head", "eagle"),
        ("medusa", "demo-eagle3", "an EAGLE-3 head", "eagle3"),
        ("medusa", "demo-draft", "a model", "draft_model"),
        ("draft_model", "demo-medusa", "Medusa heads", "medusa"),
        ("draft_model", "demo-eagle3", "an EAGLE-3 head", "eagle3"),
    ],
)
def test_heads_of_another_kind_are_refused_with_the_method_that_fits(
    method: str, bundled: str, held: str, fitting: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM("demo", speculative_config={"method": method, "model": bundled}, num_kv_blocks=32)
    assert str(caught.value) == (
        f"speculative_config: {bundled!r} holds {held}, which the method {method!r} can't use; "
        f"say 'method': {fitting!r}."
    )


def test_a_head_that_is_read_as_a_model_is_told_of() -> None:
    with pytest.raises(QuireError, match=r"'fc.weight', for which .* An EAGLE head has such a one: .* 'eagle'"):
        LLM("demo", speculative_config={"method": "draft_model", "model": "demo-eagle"}, num_kv_blocks=32)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    head = changed(tmp_path, {}, {})
    (head / "model.safetensors").write_bytes((head / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(QuireError, match=r"model.safetensors"):
        start(head)
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    with pytest.raises(QuireError, match=r"pytorch_model.bin can't be read"):
        start(head)
    (head / "config.json").write_text("{")
    with pytest.raises(QuireError, match=r"not valid JSON"):
        start(head)


def rows(start: int, stop: int) -> Tensor:
    """The position's number, in place of its hidden state."""
    return torch.arange(start, stop).view(-1, 1)


def test_states_are_read_once_and_refused_ones_never() -> None:
    held = HeldStates()
    held.add(0, rows(0, 5))
    assert torch.cat(held.take(5)).flatten().tolist() == [0, 1, 2, 3]  # with the tokens 1 to 4
    held.add(5, rows(5, 9))  # of drafts, the last two of which are refused
    held.cut(7)
    assert torch.cat(held.take(8)).flatten().tolist() == [4, 5, 6]
    assert (held.num_read, held.end) == (8, 7)
    held.add(7, rows(7, 8))
    assert torch.cat(held.take(9)).flatten().tolist() == [7]


def test_what_is_unknown_is_taken_as_its_neighbour() -> None:
    held = HeldStates()
    held.add(32, rows(32, 36))  # the first 32 came from the prefix cache
    assert held.num_read == 32
    assert torch.cat(held.take(36)).flatten().tolist() == [32, 32, 33, 34]


TREE = DraftTree.read("[(0,), (1,), (0, 0), (1, 0)]")


def test_of_a_tree_the_path_is_kept() -> None:
    held = HeldStates()
    held.add(0, rows(0, 9))  # the newest token is at 4, and then nodes
    held.expect(TREE, [70, 71, 72, 73])
    held.settle(np.array([0] * 5 + [71, 73, 9]), 8)
    assert held.end == 7
    held.add(7, rows(20, 21))
    assert torch.cat(held.take(9)).flatten().tolist() == [0, 1, 2, 3, 4, 6, 8, 20]
    held.add(8, rows(8, 12))
    held.expect(TREE, [70, 71, 72])
    held.settle(np.array([0] * 9 + [75]), 10)
    held.settle(np.array([0] * 9 + [70]), 10)  # once
    assert held.end == 9
