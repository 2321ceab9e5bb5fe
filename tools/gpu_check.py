"""Everything that needs an NVIDIA GPU, in one command of at most nine minutes: tests, exactness, and benchmarks.

    python tools/gpu_check.py --out gpu_results        # gpu_results.json, and gpu_results.md to read

Needs Quire, torch with CUDA and Triton; models are made here, of random weights in the shapes of Llama 3 8B and Qwen3
0.6B. Each section runs in a process of its own and has a time of its own, so that one that fails leaves the others.
Sections are given by name to run only those.
"""

import argparse
import importlib.util
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 540
MARK = "RESULT "
Result = dict[str, Any]

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
SHAPES: dict[str, Result] = {
    "llama-3-8b": {
        **_LLAMA, "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16", "vocab_size": 151936,
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    },
}  # fmt: skip


def model(name: str) -> str:
    """A folder with the configuration of a shape, which `load_format="dummy"` fills."""
    folder = Path(tempfile.gettempdir()) / "quire_gpu_check" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return str(folder)


def engine(name: str, **options: Any) -> Any:
    from quire import LLM

    given = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda", "max_model_len": 8192, **options}
    return LLM(model=model(name), **given)


def run(llm: Any, lengths: list[tuple[int, int]], seed: int = 0) -> float:
    """Seconds of requests of so many prompt and output tokens, all at once."""
    from quire import SamplingParams

    rng = random.Random(seed)
    prompts: list[Any] = [{"prompt_token_ids": [rng.randrange(1000, 100000) for _ in range(n)]} for n, _ in lengths]
    params = [SamplingParams(temperature=0.0, max_tokens=m, ignore_eos=True, detokenize=False) for _, m in lengths]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert [len(output.outputs[0].token_ids) for output in outputs] == [m for _, m in lengths]
    return seconds


def token_seconds(llm: Any, prompt: int, tokens: int, size: int = 1, rounds: int = 3) -> float:
    """Seconds of a step that decodes `size` sequences: what tokens after the first take."""
    run(llm, [(prompt, 8)] * size)
    one = min(run(llm, [(prompt, 1)] * size) for _ in range(rounds))
    return (min(run(llm, [(prompt, tokens + 1)] * size) for _ in range(rounds)) - one) / tokens


def timed(function: Callable[[], Any], rounds: int = 20) -> float:
    """Seconds of work on the device, by its own clock: the least of some rounds."""
    import torch

    function()
    found: list[float] = []
    flush = torch.empty(2**26, dtype=torch.int32, device="cuda")
    for _ in range(rounds):
        flush.zero_()  # nothing that is read is in a cache
        torch.cuda._sleep(1_000_000)  # the host gets ahead, so that the kernels wait for nothing
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return min(found)


# ---- sections


def limits() -> Result:
    """What the device reads and multiplies in bare loops; the other sections divide by that."""
    import torch

    device = torch.device("cuda")
    big = torch.ones(2**31, dtype=torch.bfloat16, device=device)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    read = big.nbytes / timed(lambda: big.view(torch.int64).sum(), 10)
    multiply = 2 * 8192**3 / timed(lambda: a @ b, 10)
    found = torch.cuda.get_device_properties(device)
    facts = {"name": found.name, "memory_gib": found.total_memory / 2**30, "torch": torch.__version__}
    return {**facts, "cuda": torch.version.cuda, "read_gb_s": read / 1e9, "multiply_tflop_s": multiply / 1e12}


def tests() -> Result:
    """The kernels' tests, compiled, and the engine's on the device."""
    folders = ["tests/gpu", "tests/unit/ops/triton", "tests/unit/sampling/test_device.py"]
    given = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--ignore=tests/unit/ops/triton/test_compiled.py"]
    if importlib.util.find_spec("xdist") is not None:
        given += ["-n", "8"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([*given, *folders], cwd=ROOT, env=environment, text=True, capture_output=True)
    return {"rc": done.returncode, "tail": done.stdout[-6000:] + done.stderr[-1000:]}


def products() -> Result:
    """The persistent product beside cuBLAS at M = 1 .. 8,192, and whether a row's bits depend on M."""
    import torch

    from quire.ops.triton import install

    install("cuda")
    rows: list[Result] = []
    for n, k in ((6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096)):
        weight = torch.randn(n, k, dtype=torch.bfloat16, device="cuda") * 0.02
        x = torch.randn(8192, k, dtype=torch.bfloat16, device="cuda")
        rows += [product(x, weight, m) for m in (1, 8, 32, 64, 128, 256, 1024, 8192) if n * m <= 2**30]
    return {"rows": rows, "all_equal": all(row["equal"] for row in rows)}


def product(x: Any, weight: Any, m: int) -> Result:
    """The first m rows of x times the weights."""
    import torch

    from quire import ops

    (n, k), many = weight.shape, ops.linear(x[:256], weight)
    own, theirs = timed(lambda: ops.linear(x[:m], weight)), timed(lambda: x[:m] @ weight.t())
    equal = bool(torch.equal(ops.linear(x[:m], weight)[:256], many[: min(m, 256)]))
    rate = {"gb_s": weight.nbytes / own / 1e9, "tflop_s": 2 * m * n * k / own / 1e12}
    return {"n": n, "k": k, "m": m, "own_us": own * 1e6, "cublas_us": theirs * 1e6, **rate, "equal": equal}


def decode() -> Result:
    """Time per token of the 8B shape at batch 1, with graphs and without, and what of the bandwidth that is."""
    found: Result = {"weights_gb": 15.0}
    for name, eager in (("graphs", False), ("eager", True)):
        start = time.perf_counter()
        llm = engine("llama-3-8b", max_num_seqs=8, enforce_eager=eager, max_num_batched_tokens=2048)
        found[f"start_{name}_s"] = time.perf_counter() - start
        found[f"token_{name}_ms"] = token_seconds(llm, 128, 256) * 1e3
        del llm
    return found


def batches() -> Result:
    """Tokens a second of the 8B shape at batch 32, 128 and 256 with contexts of 1,024."""
    llm = engine("llama-3-8b", max_num_seqs=256, max_num_batched_tokens=8192)
    return {f"tokens_s_{size}": size / token_seconds(llm, 1024, 128, size, rounds=1) for size in (32, 128, 256)}


def prefill() -> Result:
    """Prompts of 8,000 tokens of the 8B shape: operations a second."""
    llm = engine("llama-3-8b", max_num_seqs=16, max_num_batched_tokens=8192, enable_prefix_caching=False)
    run(llm, [(8000, 1)])
    seconds = min(run(llm, [(8000, 1)] * 4, seed=seed) for seed in (1, 2, 3)) / 4
    parameters = 7.5e9 - 128256 * 4096
    operations = 2 * parameters * 8000 + 2 * 2 * 32 * 128 * 32 * 8000**2 / 2
    return {"seconds": seconds, "tflop_s": operations / seconds / 1e12}


def offline() -> Result:
    """1,000 requests with lengths like ShareGPT's (log-normal: 220 and 190 tokens in the mean), the 8B shape."""
    rng = random.Random(7)

    def length(mean: float, most: int) -> int:
        return max(4, min(most, round(rng.lognormvariate(math.log(mean) - 0.5, 1.0))))

    lengths = [(length(220, 1024), length(190, 1024)) for _ in range(1000)]
    llm = engine("llama-3-8b", max_num_seqs=256, max_num_batched_tokens=8192)
    run(llm, [(1100, 300), *((16, m) for m in range(4, 259))])  # graphs of all sizes
    seconds = run(llm, lengths, seed=1)
    tokens = sum(m for _, m in lengths)
    return {"seconds": seconds, "output_tokens_s": tokens / seconds, "tokens_s": sum(map(sum, lengths)) / seconds}


def small() -> Result:
    """The 0.6B shape: time per token at batch 1, with one step in flight too, and throughput at 256."""
    llm = engine("qwen3-0.6b", max_num_seqs=256, max_num_batched_tokens=8192)
    found = {"token_ms": token_seconds(llm, 128, 256) * 1e3}
    found["tokens_s_256"] = 256 / token_seconds(llm, 128, 128, 256, rounds=1)
    llm.llm_engine.core.executor.max_in_flight = 1
    return {**found, "token_ms_one_in_flight": token_seconds(llm, 128, 256) * 1e3}


def kept(kind: str, m: int) -> Result:
    """m rows times codes as quantized checkpoints have them, and whether that is the product with their numbers."""
    import torch

    from quire import ops
    from quire.ops.grouped import expand
    from quire.quantization.base import MatrixShape
    from quire.quantization.coded import Coded

    n, k = 28672, 4096
    with torch.device("cuda"):
        made = Coded(kind).create_weights(MatrixShape(k, n), torch.bfloat16)
        x = torch.randn(m, k, dtype=torch.bfloat16)
    codes, scales, zeros = made["codes"], made["scales"].normal_().mul_(0.01), made["zeros"].zero_()
    codes.view(torch.uint8).random_(0, 120)
    own = timed(lambda: ops.quantized_linear(x, codes, scales, zeros=zeros))
    numbers = ops.linear(x, expand(codes, scales, zeros, k).bfloat16())
    equal = torch.equal(ops.quantized_linear(x, codes, scales, zeros=zeros), numbers)
    rate = {"gb_s": codes.nbytes / own / 1e9, "tflop_s": 2 * m * n * k / own / 1e12}
    return {"kind": kind, "m": m, "own_us": own * 1e6, **rate, "equal": equal}


def quantized() -> Result:
    """Time per token at batch 1 of the 8B shape in int8 and int4, and products with checkpoints' own codes."""
    from quire.ops.triton import install

    install("cuda")
    rows = [kept(kind, m) for kind in ("U4_128", "U8_128", "F8_128") for m in (1, 4096)]
    found: Result = {"rows": rows, "all_equal": all(row["equal"] for row in rows)}
    for name in ("int8", "int4"):
        llm = engine("llama-3-8b", quantization=name, max_num_seqs=8, max_num_batched_tokens=2048)
        found[f"token_{name}_ms"] = token_seconds(llm, 128, 128) * 1e3
        del llm
    return found


# By name, with the seconds that each may take; what comes last gets what is left.
SECTIONS: dict[str, tuple[Callable[[], Result], int]] = {
    "limits": (limits, 40),
    "decode": (decode, 150),
    "products": (products, 60),
    "prefill": (prefill, 60),
    "offline": (offline, 90),
    "small": (small, 60),
    "batches": (batches, 60),
    "quantized": (quantized, 90),
    "tests": (tests, 240),
}


def run_section(name: str, seconds: float) -> Result:
    """What a section printed, or how it failed."""
    given = [sys.executable, __file__, "--section", name]
    start = time.perf_counter()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(given, cwd=ROOT, start_new_session=True, **pipes) as child:
        try:
            out, errors = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # its own children, too: they would disturb what comes next
            out, errors = child.communicate()
            return {"error": f"not done after {seconds:.0f} s", "tail": (out + errors)[-4000:]}
    for line in reversed(out.splitlines()):
        if line.startswith(MARK):
            return {**json.loads(line.removeprefix(MARK)), "seconds_taken": round(time.perf_counter() - start, 1)}
    return {"error": f"exit code {child.returncode}", "tail": (out + errors)[-4000:]}


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def page(results: Result) -> str:
    """The results, to read."""
    lines = ["# On a GPU", ""]
    for name, found in results.items():
        lines += [f"## {name}", "", (SECTIONS[name][0].__doc__ or "").strip(), ""]
        lines += [f"- {key}: {shown(value)}" for key, value in found.items() if key != "rows"]
        if rows := found.get("rows"):
            lines += ["", f"| {' | '.join(rows[0])} |", "|---" * len(rows[0]) + "|"]
            lines += [f"| {' | '.join(map(shown, row.values()))} |" for row in rows]
        lines.append("")
    limit, one, many = (results.get(name, {}) for name in ("limits", "decode", "prefill"))
    if "read_gb_s" in limit and "token_graphs_ms" in one:
        share = one["weights_gb"] / one["token_graphs_ms"] * 1e3 / limit["read_gb_s"]
        lines.append(f"Batch 1, 8B: {share:.2f} of the read bandwidth (0.8 is asked).")
    if "multiply_tflop_s" in limit and "tflop_s" in many:
        lines.append(
            f"Prefill, 8B: {many['tflop_s'] / limit['multiply_tflop_s']:.2f} of the matrix rate (0.6 is asked)."
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the sections, and write what they found; 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"default: all of {', '.join(SECTIONS)}")
    parser.add_argument("--out", default="gpu_results", help="path of the results, without suffix")
    parser.add_argument("--section", choices=[*SECTIONS], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := [name for name in args.sections if name not in SECTIONS]:
        parser.error(f"there is no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    if args.section:
        print(MARK + json.dumps(SECTIONS[args.section][0]()))
        return 0
    import torch

    if not torch.cuda.is_available():
        print("no GPU that torch can use: nothing was run", file=sys.stderr)
        return 1
    end, results = time.perf_counter() + SECONDS, {}
    for name in args.sections or SECTIONS:
        left = end - time.perf_counter()
        results[name] = run_section(name, min(left, SECTIONS[name][1])) if left > 5 else {"error": "no time was left"}
        print(f"{name}: {results[name].get('error', 'done')}", flush=True)
        Path(args.out).with_suffix(".json").write_text(json.dumps(results, indent=1))
    Path(args.out).with_suffix(".md").write_text(page(results))
    print(f"results: {args.out}.json, {args.out}.md")
    return int(any("error" in found or found.get("rc") for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
