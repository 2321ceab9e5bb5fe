"""The real 260K-parameter Llama: golden greedy tokens and top-5 logprobs, as transformers computed them in fp32."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent))
tiny: Any = importlib.import_module("tiny_models")

BOS, EOS = 1, 2  # the model ends a story with either


@pytest.mark.parametrize(("block_size", "chunk"), [(16, 10_000), (8, 7)])
def test_golden(shared_data: Path, kernels: str, block_size: int, chunk: int) -> None:
    directory = shared_data / "models" / "stories260K"
    model = tiny.build_ours(directory, kernels=kernels)
    golden = json.loads((directory / "golden_greedy_fp32.json").read_text())
    paged = tiny.Paged(model, block_size, num_sequences=len(golden))
    assert len(golden) == 4
    last = {i: paged.prefill(i, case["prompt_token_ids"], chunk)[-1:] for i, case in enumerate(golden)}
    tokens: dict[int, list[int]] = {i: [] for i in last}
    while last:
        for i, logits in last.items():
            logprobs = logits[-1].log_softmax(-1)
            top = golden[i]["top5_logprobs"][len(tokens[i])]
            expected = {int(token): value for token, value in top}
            found = dict(zip(*[x.tolist() for x in reversed(logprobs.topk(5))], strict=True))
            assert list(found) == list(expected)
            assert list(found.values()) == pytest.approx(list(expected.values()), abs=1e-4)
            tokens[i].append(next(iter(found)))
        going = [i for i in last if tokens[i][-1] not in (BOS, EOS) and len(tokens[i]) < 64]
        last = paged.step({i: tokens[i][-1:] for i in going}) if going else {}
    assert [tokens[i] for i in range(4)] == [case["greedy_token_ids"] for case in golden]


def test_bits_do_not_depend_on_the_batch(shared_data: Path, kernels: str) -> None:
    directory = shared_data / "models" / "stories260K"
    for dtype in ("float32", "bfloat16"):
        model = tiny.build_ours(directory, dtype, kernels)
        prompts = [[1, *range(3 + n, 40 + 5 * n)] for n in range(8)]
        batch = tiny.Paged(model, 8, num_sequences=8)
        together = batch.step(dict(enumerate(prompts)))
        for n, one in enumerate(prompts):
            assert torch.equal(tiny.Paged(model, 64).prefill(0, one, 16), together[n])
