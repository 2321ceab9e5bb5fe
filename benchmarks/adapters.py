"""Throughput of a batch whose requests have adapters, beside the same batch without, and what a load takes.

    python benchmarks/adapters.py MODEL [--batch-size 32] [--adapters 1 8 64] [--rank 16] [--output-len 64] [--rounds 3]

Adapters are random, for q, k, v, o and the three matrices of an MLP. Two engines take turns: one that knows of none,
one that has room for all. Ratios are medians of the rounds; "no" is the engine with room, whose requests name none.
Then adapters are loaded one after the other while a request runs: the longest gap between two of its tokens is shown.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire import LLM, AsyncLLM, EngineArgs, SamplingParams
from quire.lora.request import LoRARequest
from quire.utils.hub import resolve_model_path

Pair = tuple[float, float]  # seconds
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(model: Path, folder: Path, rank: int, seed: int) -> None:
    """A folder as PEFT writes them, with factors drawn from the seed."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads, kv_heads = size * config["num_attention_heads"], size * config["num_key_value_heads"]
    shapes = dict(
        zip(_TARGETS, ((hidden, heads), (hidden, kv_heads), (hidden, kv_heads), (heads, hidden)), strict=False)
    )
    shapes |= {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in shapes.items():
            part = "mlp" if name in _TARGETS[4:] else "self_attn"
            key = f"base_model.model.model.layers.{layer}.{part}.{name}.lora_"
            tensors[f"{key}A.weight"] = torch.randn(rank, inputs, generator=generator).to(torch.bfloat16) / inputs**0.5
            tensors[f"{key}B.weight"] = torch.randn(outputs, rank, generator=generator).to(torch.bfloat16) / 100
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    found = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(_TARGETS), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(found))


def throughput(llm: LLM, batch_size: int, output_len: int, adapters: list[LoRARequest]) -> float:
    """Output tokens a second of one batch, whose requests take the adapters in turn."""
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    prompts = [{"prompt_token_ids": [100 + i, 7, 9]} for i in range(batch_size)]
    loras = [adapters[i % len(adapters)] for i in range(batch_size)] if adapters else None
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False, lora_request=loras)  # type: ignore[arg-type]
    return batch_size * output_len / (time.perf_counter() - start)


async def stall(model: str, adapters: list[LoRARequest], options: dict[str, object]) -> tuple[list[Pair], list[Pair]]:
    """Seconds that a request for one token takes, and a neighbour's longest gap meanwhile: without loads, and with."""
    engine = AsyncLLM.from_engine_args(EngineArgs(model=model, **options))
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    long = SamplingParams(temperature=0, max_tokens=480, ignore_eos=True)
    gaps: list[float] = []

    async def neighbour() -> None:
        for number in itertools.count():
            last = None
            async for _ in engine.generate({"prompt_token_ids": [5, 6, 7]}, long, f"neighbour-{number}"):
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last = now

    async def one(name: str, lora: LoRARequest | None) -> float:
        start = time.perf_counter()
        async for _ in engine.generate({"prompt_token_ids": [5, 6, 7]}, params, name, lora_request=lora):
            pass
        return time.perf_counter() - start

    async def longest_gap(name: str, lora: LoRARequest | None) -> tuple[float, float]:
        mark, seconds = len(gaps), await one(name, lora)
        await asyncio.sleep(max(0.01, 0.05 - seconds))  # without a load no less time than with one
        return seconds, max(gaps[mark:])

    running = asyncio.create_task(neighbour())
    await asyncio.sleep(0.3)
    without = [await longest_gap(f"without-{i}", None) for i in range(2 * len(adapters))][len(adapters) :]
    loads = [await longest_gap(f"with-{i}", lora) for i, lora in enumerate(adapters)]
    running.cancel()
    engine.shutdown()
    return without, loads


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="0: only what loads take")
    given = parser.parse_args()
    path = Path(resolve_model_path(given.model))
    most = max(given.adapters)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 1024, "max_model_len": 512}
    room = {"enable_lora": True, "max_loras": most, "max_lora_rank": given.rank}
    with tempfile.TemporaryDirectory() as scratch:
        for i in range(most):
            write_adapter(path, Path(scratch) / f"a{i}", given.rank, i)
        adapters = [LoRARequest(f"a{i}", i + 1, f"{scratch}/a{i}") for i in range(most)]
        base = LLM(model=given.model, **options)
        with_room = LLM(model=given.model, **options, **room)
        for llm, count in ((base, 0), *((with_room, count) for count in (0, *given.adapters))):
            throughput(llm, max(given.batch_size, count), 2, adapters[:count])
        ratios: dict[int, list[float]] = {count: [] for count in (0, *given.adapters)}
        for _ in range(given.rounds):
            for count, found in ratios.items():
                before = throughput(base, given.batch_size, given.output_len, [])
                now = throughput(with_room, given.batch_size, given.output_len, adapters[:count])
                found.append(now / before)
                print(
                    f"{count or 'no':>4} adapters: {now:6.0f} tokens/s, base {before:6.0f}: {now / before:.3f}",
                    flush=True,
                )
        for count, found in ratios.items():
            if found:
                print(
                    f"{count or 'no':>4} adapters: median {statistics.median(found):.3f} of the base model's throughput"
                )
        del base, with_room
        kinds = zip(("no load", "a load"), asyncio.run(stall(given.model, adapters[:16], options | room)), strict=True)
        for what, pairs in kinds:
            first, gap = ([statistics.median(each), max(each)] for each in zip(*pairs, strict=True))
            print(
                f"{what}: first token {first[0] * 1e3:.1f} ms (median; at most {first[1] * 1e3:.1f}), "
                f"a neighbour's longest gap {gap[0] * 1e3:.1f} ms (at most {gap[1] * 1e3:.1f})"
            )


if __name__ == "__main__":
    main()
