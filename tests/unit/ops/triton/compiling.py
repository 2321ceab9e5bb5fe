"""Compiles every kernel for a GPU that is not there, as it would be launched, and says what each came to.

    python tests/unit/ops/triton/compiling.py 90

A helper of test_compiled.py, which runs it in a process of its own: Triton either interprets or compiles.
"""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from quire import SamplingParams, ops
from quire.attention.base import AttentionBatch, Tails
from quire.attention.step import Step
from quire.attention.triton import TritonBackend
from quire.layers.linear import Linear, Place
from quire.layers.mlp import GatedMLP
from quire.layers.moe import MixtureOfExperts, Routing
from quire.ops.table import OPERATIONS
from quire.ops.triton import attention, install
from quire.ops.triton.sampler import rehearse
from quire.ops.triton.tiles import Processors
from quire.quantization.base import Unquantized
from quire.quantization.coded import Coded
from quire.quantization.grouped import KEPT
from quire.sampling.device import DeviceSampler
from quire.sampling.state import SamplingState
from quire.sampling.tokens import SequenceTokens

CAPABILITY = int(sys.argv[1])
SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}  # that a program can have
PRODUCTS = r"(?:wgmma.mma_async|mma.sync|tcgen05.mma)\.[\w.:]+|fma.rn.f32"
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class Driver:
    """Stands for a GPU: it has the limits of one, takes what is compiled for it, and runs nothing."""

    launcher_cls = staticmethod(lambda source, metadata: lambda *launch: None)

    def __init__(self) -> None:
        self.utils = self

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_KIB[CAPABILITY] << 10}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[object, int, int, int, int]:
        """A module, a function, its registers, the bytes that spill, and the threads that there are registers for."""
        with NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(binary)
            told = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True)
        [(registers, spilled)] = re.findall(r"REG:(\d+) STACK:(\d+)", told.stdout)
        return object(), 1, int(registers), int(spilled), min(1024, 65536 // int(registers) // 32 * 32)


LAUNCH = JITFunction.run
compiled: set[str] = set()


def run(kernel: Any, *args: Any, **told: Any) -> Any:
    """A launch, of which each kernel's first is told of."""
    made = LAUNCH(kernel, *args, **told)
    if made.hash not in compiled:
        compiled.add(made.hash)
        ptx = made.asm["ptx"]
        kinds = {re.sub(r"n\d+k", "nk", found) for found in re.findall(PRODUCTS, ptx)}
        early = ptx.count("cp.async.cg"), ptx.count("cp.async.bulk.tensor")
        facts = {"kernel": kernel.__name__, "x": made.src.signature[kernel.arg_names[0]], "products": sorted(kinds)}
        facts |= {"early": early, "bytes": made.metadata.shared, "registers": made.n_regs, "spilled": made.n_spills}
        print(json.dumps(facts), flush=True)
    return made


def every_kernel() -> None:
    x, vector = torch.zeros(8192, 256, dtype=torch.bfloat16), torch.zeros(256, dtype=torch.bfloat16)
    matrix, bias = torch.zeros(4096, 256, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16)
    ops.rms_norm(x, vector, 1e-6)
    ops.add_rms_norm(x, x, vector, 1e-6, True)
    ops.layer_norm(x, vector, vector, 1e-6)
    ops.embedding(torch.zeros(3, dtype=torch.int32), matrix)
    for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh", "relu", "relu2", "swiglu_oai"):
        OPERATIONS[name](x)
    for rows in (1, 130, 8192):
        ops.integer_linear(x[:rows].to(torch.int8), matrix.to(torch.int8))
        ops.linear(x[:rows], matrix, bias)
        ops.linear(x[:rows, :100], matrix[:, :100], None, torch.float32)
        ops.linear(x[:rows].float(), matrix.float())
        made = ("int8", "int4", *(["fp8"] if CAPABILITY >= 89 else []))
        for method in (*map(Coded, made), *map(Coded, KEPT)):
            layer = Linear(Place("", method, x.dtype), 256, 4096, bias=True)
            layer(x[:rows])
        Linear(Place("", Coded("U4_32"), torch.float32), 160, 4096)(x[:rows, :160].float())
    for method in (Unquantized(), Coded("int8"), Coded("int4"), Coded("U4_128"), Coded("F8_128")):
        place = Place("", method, x.dtype)
        biased = isinstance(method, Unquantized) or method.kind == "U4_128"  # as gpt-oss
        matrices = [[Linear(place, 256, rows, bias=biased) for rows in (512, 256)] for _ in range(8)]
        mlps = [GatedMLP(*pair, "swiglu_oai" if biased else "silu") for pair in matrices]
        gate = Linear(Place("", Unquantized(), x.dtype), 256, 8)
        for rows in (1, 64):
            mlps[0](x[:rows], None)
        MixtureOfExperts(Routing(8, 2, True), gate, mlps)(x[:3], Step(torch.arange(3)))
        ops.route(gate(x[:3], wide=True), Routing(8, 2, True, True, 2.5, torch.zeros(8)))


def every_attention() -> None:
    dtype = torch.bfloat16
    for kind, dim, more in (
        ("model", 128, {}),
        ("model", 80, {"window": 100}),
        ("model", 64, {"softcap": 30.0, "sinks": torch.zeros(8, dtype=dtype)}),
        ("model", 256, {"causal": False}),
        ("model", 512, {}),
        ("int8", 128, {}),
        *([("fp8", 128, {})] if CAPABILITY >= 89 else []),
    ):
        backend = TritonBackend(kind)  # type: ignore[arg-type]
        norm = torch.ones(dim, dtype=dtype) if dim == 128 else None
        spec = ops.AttentionSpec(8, 2, dim, 0.1, q_norm=norm, k_norm=norm, rope=torch.zeros(4096, dim), **more)
        cache = torch.zeros(backend.kv_cache_shape(256, 16, 2, dim), dtype=backend.kv_cache_dtype(dtype))
        for lengths, tokens in (([3000], 1), ([70] * 8, 1), ([500, 300], 200)):
            size = len(lengths)
            starts = torch.arange(size + 1, dtype=torch.int32) * tokens
            tables = torch.zeros(size, -(-max(lengths) // 16), dtype=torch.int32)
            slots = torch.zeros(size * tokens, dtype=torch.int32)
            tails = Tails(starts[:-1] + 9, starts[:-1], tables) if size == 8 and dim == 128 else None
            batch = AttentionBatch(starts, torch.tensor(lengths, dtype=torch.int32), tables, slots, 16, tails)
            qkv = torch.zeros(len(slots), spec.qkv_size, dtype=dtype)
            backend.attend(qkv, spec, Step(slots, [cache], [backend.build(batch)]))


def every_draw() -> None:
    for vocab, dtype in ((152064, torch.float32), (1000, torch.bfloat16)):
        rehearse(torch.zeros(1, vocab, dtype=dtype))
        known, sampler = {*compiled}, DeviceSampler(torch.zeros(8, dtype=torch.int32), vocab)
        for several in (
            [SamplingParams(temperature=0)],
            [SamplingParams(temperature=0.7), SamplingParams(top_p=0.9, presence_penalty=0.5, repetition_penalty=1.1)],
            [SamplingParams(top_k=50, logprobs=5), SamplingParams(top_k=2000 if vocab > 2000 else 999, min_p=0.1)],
            [SamplingParams(logit_bias={3: 1.0}, allowed_token_ids=[1, 2, 3], logprobs=0)],
        ):
            for row, params in enumerate(several):
                tokens = SequenceTokens(np.arange(1, 13, dtype=np.int32), num_prompt=3, num=4)
                sampler.assign(row, SamplingState(params, tokens, seed=1, sequence_index=0, vocab_size=vocab))
            logits = torch.zeros(len(several), vocab, dtype=dtype)
            sampler.launch(logits, range(len(several)), [1] * len(several))
        assert compiled == known, "a request would have waited for a kernel"


if __name__ == "__main__":
    JITFunction.run = run
    triton.runtime.driver.set_active(Driver())
    there = Processors((CAPABILITY // 10, CAPABILITY % 10), 132)
    limits = CAPABILITY // 10 == 9, min(SHARED_KIB[CAPABILITY] << 10, attention.MAX_SHARED)
    attention._limits = lambda device: limits  # type: ignore[assignment]
    for name in ("experts", "linear"):
        importlib.import_module(f"quire.ops.triton.{name}").processors = lambda device: there  # type: ignore[attr-defined]
    install("cpu")
    every_kernel()
    every_attention()
    every_draw()
