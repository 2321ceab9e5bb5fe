"""EAGLE heads in their published formats, run by the engine through chunks and drafts, against plain torch in fp32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.utils.hub import resolve_model_path
from quire.worker.eagle import EagleProposer

transformers: Any = pytest.importorskip("transformers")

SIZE, HEAD_DIM, HEADS, KV_HEADS, INNER = 256, 64, 2, 1, 96
CONFIG = json.loads((resolve_model_path("demo") / "config.json").read_text()) | {
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INNER,
    "max_position_embeddings": 64,
}


def random_head(kind: str, *, num_drawn: int = 0, biased: bool = False, shared: bool = False) -> dict[str, Tensor]:
    """Tensors as EAGLE's authors and SpecForge name them."""
    torch.manual_seed(5)
    layer, width = ("midlayer", 2 * SIZE) if kind == "eagle3" else ("layers.0", SIZE)
    shapes = {
        "fc.weight": (SIZE, (3 if kind == "eagle3" else 2) * SIZE),
        f"{layer}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, width),
        f"{layer}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, width),
        f"{layer}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, width),
        f"{layer}.self_attn.o_proj.weight": (SIZE, HEADS * HEAD_DIM),
        f"{layer}.mlp.gate_proj.weight": (INNER, SIZE),
        f"{layer}.mlp.up_proj.weight": (INNER, SIZE),
        f"{layer}.mlp.down_proj.weight": (SIZE, INNER),
        f"{layer}.post_attention_layernorm.weight": (SIZE,),
    }
    if kind == "eagle3":
        names = (f"{layer}.input_layernorm.weight", f"{layer}.hidden_norm.weight", "norm.weight")
        shapes |= dict.fromkeys(names, (SIZE,))
    if num_drawn:
        shapes["lm_head.weight"] = (num_drawn, SIZE)
    if biased:
        shapes |= {"fc.bias": (SIZE,), f"{layer}.input_layernorm.weight": (SIZE,)}
    if shared:
        shapes["embed_tokens.weight"] = (CONFIG["vocab_size"], SIZE)
    found = {
        name: torch.randn(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 1.0) for name, shape in shapes.items()
    }
    if num_drawn:
        chosen = torch.randperm(CONFIG["vocab_size"])[:num_drawn].sort().values
        found["d2t"] = chosen - torch.arange(num_drawn)
        found["t2d"] = torch.zeros(CONFIG["vocab_size"], dtype=torch.bool).index_fill(0, chosen, True)
    return found


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).sqrt() * weight


def rotate(x: Tensor) -> Tensor:
    """[heads, N, D] at positions 0, 1, ...: attention sees differences alone."""
    angles = torch.outer(torch.arange(x.shape[1]), 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)).repeat(1, 2)
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def plain(held: dict[str, Tensor], embedded: Tensor, hidden: Tensor, before_residual: bool) -> Tensor:
    """What leaves the head, [N, H], of tokens 1 .. N and the hidden states of 0 .. N - 1."""
    w = {name.replace("midlayer.", "").replace("layers.0.", "").removesuffix(".weight"): t for name, t in held.items()}
    if "hidden_norm" in w:
        x = hidden @ w["fc"].T
        normed = norm(x, w["hidden_norm"])
        inner, x = torch.cat([norm(embedded, w["input_layernorm"]), normed], -1), normed if before_residual else x
    else:
        x = torch.cat([embedded, hidden], -1) @ w["fc"].T + w.get("fc.bias", 0.0)
        inner = norm(x, w["input_layernorm"]) if "input_layernorm" in w else x
    split = (len(x), -1, HEAD_DIM)
    q = rotate((inner @ w["self_attn.q_proj"].T).view(split).transpose(0, 1))
    k = rotate((inner @ w["self_attn.k_proj"].T).view(split).transpose(0, 1))
    v = (inner @ w["self_attn.v_proj"].T).view(split).transpose(0, 1)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + mixed.transpose(0, 1).reshape(len(x), -1) @ w["self_attn.o_proj"].T
    inner = norm(x, w["post_attention_layernorm"])
    return x + (F.silu(inner @ w["mlp.gate_proj"].T) * (inner @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, list[int]]] = {
    "eagle": ({"shared": True}, {}, "model.safetensors", []),
    "eagle-biased": ({"biased": True}, {}, "pytorch_model.bin", []),
    "eagle3": ({}, {}, "model.safetensors", [2, 2, 2]),
    "eagle3-fewer": (
        {"num_drawn": 300},
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": 300,
            "norm_before_residual": True,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
        },
        "pytorch_model.bin",
        [1, 3, 4],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_heads_compute_what_they_were_published_as(
    tmp_path: Path, case: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, config, file, taps = CASES[case]
    kind = case.partition("-")[0]
    held = random_head(kind, **made)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | config))
    if file.endswith("bin"):
        torch.save(held, tmp_path / file)
    else:
        save_file(held, tmp_path / file)
    drafted: list[tuple[int, int]] = []
    propose = EagleProposer.propose

    def proposing(self: EagleProposer, rows: Any, *others: Any) -> Any:
        drafts = propose(self, rows, *others)
        drafted.extend((row.tokens.num, one[0]) for row, one in zip(rows, drafts, strict=True))
        return drafts

    monkeypatch.setattr(EagleProposer, "propose", proposing)
    speculative = {"method": kind, "model": str(tmp_path), "num_speculative_tokens": 2, "adaptive": False}
    llm = LLM(
        "demo", dtype="float32", kernels=kernels, max_num_batched_tokens=24, block_size=16, debug=True,
        speculative_config=speculative, show_progress=False,
    )  # fmt: skip
    prompt = (
        "It was a bright cold day, and the captain of the ship said to the boy that they would sail at dawn for the"
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    tokens = torch.tensor([*(output.prompt_token_ids or []), *output.outputs[0].token_ids])

    theirs = transformers.LlamaForCausalLM.from_pretrained(resolve_model_path("demo"), dtype=torch.float32)
    table: Tensor = theirs.model.embed_tokens.weight
    assert len(drafted) > 5
    with torch.inference_mode():
        states = theirs(tokens[None], output_hidden_states=True).hidden_states
        hidden = torch.cat([states[tap][0] for tap in taps], -1) if taps else states[-1][0]
        made = plain(held, table[tokens[1:]], hidden[:-1], bool(config.get("norm_before_residual")))
        normed = norm(made, held["norm.weight"]) if "norm.weight" in held else made
        likeliest = (normed @ held.get("lm_head.weight", table).mT).argmax(-1)
    for num_tokens, draft in drafted:
        best = likeliest[num_tokens - 2]
        assert draft == best + (held["d2t"][best] if "d2t" in held else 0)
