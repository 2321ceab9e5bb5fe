"""The sections of the check on a GPU: each yields what it finds, piece by piece. `gpu_check.py` beside it runs them.

Nothing here knows of files, processes of sections, or how much time is left for the others.
"""

import contextlib
import cProfile
import importlib.util
import json
import math
import os
import pstats
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_measures import (
    DEVICE,
    Result,
    engine,
    kernels,
    mean,
    own_times,
    release,
    run,
    step_seconds,
    steps,
    timed,
    told_of_failure,
    trace,
)

ROOT = Path(__file__).resolve().parent.parent
EQUAL = "equal"
Section = Callable[[float], Iterator[Result]]  # of the seconds that it may take; yields what it finds, piece by piece


def limits(seconds: float) -> Iterator[Result]:
    """What the device is, reads and multiplies in bare loops; the other sections divide by that."""
    import torch

    found = torch.cuda.get_device_properties(DEVICE)
    yield {"name": found.name, "memory_gib": found.total_memory / 2**30, "capability": f"{found.major}.{found.minor}"}
    yield {"torch": torch.__version__, "cuda": torch.version.cuda}
    yield {"triton": importlib.import_module("triton").__version__}
    with contextlib.suppress(OSError):
        asked = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
        yield {"driver": subprocess.run(asked, capture_output=True, text=True).stdout.strip()}
    big = torch.ones(2**31, dtype=torch.bfloat16, device=DEVICE)
    yield {"read_gb_s": big.nbytes / timed(lambda: big.view(torch.int64).sum(), 10) / 1e9}
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    yield {"multiply_tflop_s": 2 * 8192**3 / timed(lambda: a @ b, 10) / 1e12}


def first(seconds: float) -> Iterator[Result]:
    """The bundled model in each way: the tokens are the CPU's, or others (as of int8 and int4), or there are none."""
    from quire import LLM, SamplingParams

    given: Result = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    given["num_kv_blocks"] = 256  # others run beside it

    def tokens(**options: Any) -> list[Any]:
        llm = LLM("demo", **given, **options)
        asked = [{"temperature": 0.0}, {"top_p": 0.9, "seed": 1, "presence_penalty": 0.5}, {"top_k": 20, "seed": 2}]
        params = [SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1, **each) for each in asked]
        outputs = llm.generate(["Once upon a time", "The ship", "A"], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    expected = tokens(device="cpu", kernels="torch")
    ways: dict[str, Result] = {"eager": {"enforce_eager": True}, "graphs": {}, "int8 cache": {"kv_cache_dtype": "int8"}}
    ways |= {"int8": {"quantization": "int8"}, "int4": {"quantization": "int4"}, "plain torch": {"kernels": "torch"}}
    for name, options in ways.items():
        start = time.perf_counter()
        try:
            found = tokens(device=DEVICE, **options)
            told = "the CPU's tokens" if found == expected else f"others: {found}, and not {expected}"
        except Exception:
            told = traceback.format_exc()[-3000:]
            yield {"error": f"{name} failed"}
        yield {name: told, f"{name}, seconds": time.perf_counter() - start}


def tests_of(paths: list[str], processes: int, seconds: float) -> Iterator[Result]:
    """What pytest says of those tests, compiled; it is interrupted in time to say what failed so far."""
    given = [sys.executable, "-m", "pytest", "--tb=short", "-rfE", "--durations=8", "-o", "faulthandler_timeout=60"]
    if importlib.util.find_spec("xdist") is not None:
        given += ["-n", str(processes)]
    if importlib.util.find_spec("pytest_benchmark") is not None:
        given += ["-p", "no:benchmark"]  # whose every process warns
    found = Result()
    with tempfile.TemporaryFile("w+") as told:
        environment = {**os.environ, "TRITON_INTERPRET": "0", "COLUMNS": "240"}  # or reasons of failures are cut off
        child = subprocess.Popen([*given, *paths], cwd=ROOT, env=environment, stdout=told, stderr=subprocess.STDOUT)
        try:
            child.wait(max(1.0, seconds - 18))
        except subprocess.TimeoutExpired:
            found["error"] = f"interrupted after {seconds - 18:.0f} s"
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(14)
        told.seek(0)
        yield found | {"rc": child.poll()} | told_by_pytest(told.read())


def told_by_pytest(text: str) -> Result:
    """How many tests passed and failed, the name and the reason of each that failed, and the rest as it is."""
    text = re.sub(r"([=_!-])\1{9,}", lambda rule: rule[1] * 9, text)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - (.*))?$", text, re.MULTILINE)
    counts = re.findall(r"^\W*(\d+ (?:passed|failed|skipped|error|warning).* in [\d.]+s)", text, re.MULTILINE)
    found: Result = {"counts": counts[-1] if counts else "not told"}
    if failed:
        found["rows"] = [{"failed": name, "reason": reason[:300]} for name, reason in failed]
    return found | {"tail": re.sub(r"^(?:FAILED|ERROR) .*\n", "", text, flags=re.MULTILINE)[-8000:]}


def engines(seconds: float) -> Iterator[Result]:
    """The engine's tests: the same tokens alone, together, in pieces, preempted, in graphs and without."""
    return tests_of(["tests/gpu/test_engine.py"], 6, seconds)


def tests(seconds: float) -> Iterator[Result]:
    """The kernels' tests, and those of quantized checkpoints."""
    folders = ["tests/gpu", "tests/unit/ops/triton", "tests/unit/sampling/test_device.py"]
    left_out = ["--ignore=tests/gpu/test_engine.py", "--ignore=tests/unit/ops/triton/test_compiled.py"]
    return tests_of([*folders, *left_out], 8, seconds)


def served(seconds: float) -> Iterator[Result]:
    """`quire serve` with the bundled model on the device: its answers are the CPU's, and it ends when asked to."""
    from quire import LLM, SamplingParams

    start, prompt = time.perf_counter(), "Once upon a time"
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    given = ["--device", DEVICE, "--dtype", "float32", "--num-kv-blocks", "256", "--port", address.rpartition(":")[2]]
    child = subprocess.Popen([sys.executable, "-m", "quire", "serve", "demo", *given], cwd=ROOT)
    try:
        while child.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/health", timeout=5):
                break
            time.sleep(0.2)
        yield {"start_s": time.perf_counter() - start}
        body = json.dumps({"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 24}).encode()
        request = urllib.request.Request(f"http://{address}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            found = json.load(response)["choices"][0]["text"]
    finally:
        child.send_signal(signal.SIGINT)
        yield {"exit_code": child.wait(30)}
    llm = LLM("demo", device="cpu", kernels="torch", dtype="float32", max_model_len=512)
    expected = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)[0].outputs[0].text
    yield {"text": found} | ({} if found == expected else {"error": f"the CPU says {expected!r}"})


def exact(seconds: float) -> Iterator[Result]:
    """The 0.6B shape: tokens and logprobs of a request, whatever runs beside it and however steps are made."""
    asked = asked_of_exact()
    given: Result = {"max_model_len": 2048, "max_num_seqs": 32, "max_num_batched_tokens": 2048, "num_kv_blocks": 768}
    given["enable_prefix_caching"] = False

    def answers(options: Result, *batches: slice) -> tuple[list[list[Any]], int]:
        """Of each batch, and how many sequences were preempted."""
        release()
        llm = engine("qwen3-0.6b", **given | options)
        found = [answered(llm, asked[batch]) for batch in batches]
        return found, llm.llm_engine.stats().num_preemptions_total

    whole, some = slice(None), (1, 4, 7, 9, 12, 18)
    (expected, *alone), _ = answers({}, whole, *(slice(i, i + 1) for i in some))
    told = {"alone": difference([one for [one] in alone], [expected[i] for i in some])}
    yield told
    ways: dict[str, Result] = {"in chunks of 256": {"max_num_batched_tokens": 256}}
    ways |= {"with a prefix cache": {"enable_prefix_caching": True}, "without graphs": {"enforce_eager": True}}
    ways["preempted"] = {"block_size": 16, "num_kv_blocks": 140}
    preemptions = 0
    for name, options in ways.items():
        found, preemptions = answers(options, whole, *[whole] * ("cache" in name))
        told[name] = difference([one for batch in found for one in batch], expected * len(found))
        yield {**told, "preemptions": preemptions}
    assert preemptions, "nothing was preempted"
    if differing := [name for name, one in told.items() if one != EQUAL]:
        yield {"error": f"others: {', '.join(differing)}"}


def asked_of_exact() -> list[tuple[list[int], Any]]:
    """Prompts of 5 to 1,500 tokens, every third with the same 600 first, greedy and drawn."""
    from quire import SamplingParams

    rng = random.Random(3)
    shared = [rng.randrange(1000, 100000) for _ in range(600)]
    lengths = (5, 700, 17, 64, 900, 256, 129, 1500, 33, 1000, 511, 640)
    asked: list[tuple[list[int], Any]] = []
    for i, length in enumerate(lengths * 2):
        beginning = shared * (length > 600)
        prompt = beginning + [rng.randrange(1000, 100000) for _ in range(length - len(beginning))]
        drawn: Result = {"temperature": 0.8, "top_p": 0.9, "seed": i} if i % 3 else {"temperature": 0.0}
        drawn |= {"top_k": 40, "presence_penalty": 0.5} if i % 6 == 1 else {}
        given: Result = {"max_tokens": 24 + i % 17, "ignore_eos": True, "logprobs": 1, "detokenize": False}
        asked.append((prompt, SamplingParams(**given, **drawn)))
    return asked


def answered(llm: Any, asked: list[tuple[list[int], Any]]) -> list[Any]:
    """Tokens of each with their logprobs."""
    prompts = [{"prompt_token_ids": ids} for ids, _ in asked]
    outputs = llm.generate(prompts, [params for _, params in asked], use_tqdm=False)
    both = [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]
    return [[(token, step[token].logprob) for token, step in zip(*one, strict=True)] for one in both]


def difference(found: list[list[Any]], expected: list[list[Any]]) -> str:
    """Where the first one differs."""
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if one != other:
                count = sum(ours != theirs for ours, theirs in zip(found, expected, strict=True))
                return f"{count} of {len(found)} differ, first number {i} at token {place}: {one}, and not {other}"
    return EQUAL


def products(seconds: float) -> Iterator[Result]:
    """The persistent product beside cuBLAS at M = 1 .. 8,192, and whether a row's bits depend on M."""
    import torch

    from quire.ops.triton import install

    install("cuda")
    for n, k in ((6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096)):
        weight = torch.randn(n, k, dtype=torch.bfloat16, device=DEVICE) * 0.02
        x = torch.randn(8192, k, dtype=torch.bfloat16, device=DEVICE)
        for m in (1, 16, 64, 128, 256, 1024, 8192):
            if n * m <= 2**28:  # nobody asks for logits of more
                yield {"rows": [product(x, weight, m)]}


def product(x: Any, weight: Any, m: int) -> Result:
    """The first m rows of x times the weights; of those of an MLP also with their activation, in one kernel and two."""
    import torch

    from quire import ops

    (n, k), many, gate = weight.shape, ops.linear(x[:256], weight), ops.silu_and_mul
    rounds = 20 if m <= 1024 else 8
    own, theirs = timed(lambda: ops.linear(x[:m], weight), rounds), timed(lambda: x[:m] @ weight.t(), rounds)
    equal = bool(torch.equal(ops.linear(x[:m], weight)[:256], many[: min(m, 256)]))
    rate = {"gb_s": weight.nbytes / own / 1e9, "tflop_s": 2 * m * n * k / own / 1e12}
    ways = {"gated": lambda: ops.gated_linear(x[:m], gate, weight), "apart": lambda: gate(ops.linear(x[:m], weight))}
    gated = {f"{way}_us": timed(run, rounds) * 1e6 if n == 28672 else "" for way, run in ways.items()}
    return {"n": n, "k": k, "m": m, "own_us": own * 1e6, "cublas_us": theirs * 1e6, **gated, **rate, "equal": equal}


def stages(seconds: float) -> Iterator[Result]:
    """Products of few rows with more and fewer tiles on their way than `quire.ops.triton.tiles` has."""
    import torch

    from quire import ops
    from quire.ops.triton import install

    install("cuda")
    linear: Any = importlib.import_module("quire.ops.triton.linear")
    kept = linear.choose
    for n, k in ((6144, 4096), (28672, 4096), (4096, 14336)):
        weight = torch.randn(n, k, dtype=torch.bfloat16, device=DEVICE) * 0.02
        for m, most in ((1, 10), (32, 9), (64, 6)):
            x = torch.randn(m, k, dtype=torch.bfloat16, device=DEVICE)
            row: Result = {"n": n, "k": k, "m": m, "own_us": timed(lambda x=x, w=weight: ops.linear(x, w)) * 1e6}
            for number in range(3, most + 1):
                linear.choose = lambda *given, number=number: kept(*given)._replace(num_stages=number)
                row[f"{number}"] = timed(lambda x=x, w=weight: ops.linear(x, w), 10) * 1e6
            linear.choose = kept
            yield {"rows": [row | {f"{number}": "" for number in range(most + 1, 11)}]}


def small(seconds: float) -> Iterator[Result]:
    """The 0.6B shape: a token at batch 1, with one step in flight too; throughput at 256; the host's part, profiled."""
    start = time.perf_counter()
    llm = engine("qwen3-0.6b", max_num_seqs=256, max_num_batched_tokens=8192)
    yield {"start_s": time.perf_counter() - start}
    yield {"token_ms": step_seconds(llm, 128, 256, rounds=3) * 1e3}
    step = step_seconds(llm, 128, 96, 256)
    yield {"step_ms_256": step * 1e3, "tokens_s_256": 256 / step}
    executor = llm.llm_engine.core.executor
    executor.max_in_flight = 1
    yield {"token_ms_one_in_flight": step_seconds(llm, 128, 256) * 1e3}
    yield {"step_ms_256_one_in_flight": step_seconds(llm, 128, 96, 256) * 1e3}
    executor.max_in_flight = 2
    profile = cProfile.Profile()
    profile.enable()
    ended = steps(llm, [(128, 96)] * 256)
    profile.disable()
    yield {"profiled_step_ms": mean(ended) * 1e3, "profiled_steps": len(ended)}
    yield {"rows": functions(profile)}


def functions(profile: cProfile.Profile, most: int = 25) -> list[Result]:
    """Those with most time of their own."""
    found: dict[tuple[str, int, str], Any] = vars(pstats.Stats(profile))["stats"]
    longest = sorted(found.items(), key=lambda each: -each[1][2])[:most]
    return [
        {"function": f"{'/'.join(Path(file).parts[-3:])}:{line} {name}", "calls": calls, "ms": own * 1e3}
        for (file, line, name), (_, calls, own, *_) in longest
    ]


@contextlib.contextmanager
def one_after_another() -> Iterator[None]:
    """Kernels begin when the last one has ended: else a profile counts the time that they wait for it as theirs."""
    common: Any = importlib.import_module("quire.ops.triton.common")
    kept, common.starts_early = common.starts_early, lambda: False
    try:
        yield
    finally:
        common.starts_early = kept


def llama(seconds: float) -> Iterator[Result]:
    """The 8B shape: a token at batch 1, long prompts, 1,000 requests with lengths like ShareGPT's, large batches."""
    start = time.perf_counter()
    llm = engine("llama-3-8b", max_num_seqs=1024, max_num_batched_tokens=8192)
    yield {"start_s": time.perf_counter() - start}
    yield {"weights_gb": 15.0, "token_ms": step_seconds(llm, 128, 256, rounds=2) * 1e3}
    run(llm, [(8000, 1)])
    prompt = min(run(llm, [(8000, 1)] * 2, seed=seed) for seed in (1, 2)) / 2
    parameters = 7.5e9 - 128256 * 4096
    operations = 2 * parameters * 8000 + 2 * 2 * 32 * 128 * 32 * 8000**2 / 2
    yield {"prompt_s": prompt, "prompt_tflop_s": operations / prompt / 1e12}
    with told_of_failure() as failed, one_after_another():
        yield {"rows": [{"what": "prompt", **row} for row in kernels(lambda: run(llm, [(8000, 1)], seed=12), 6)]}
    yield failed
    lengths = lengths_of_chats(1000)
    run(llm, [(prompt, min(tokens, 24)) for prompt, tokens in lengths])  # graphs of all sizes, of mixtures
    run(llm, [(16, 4 + i // 4) for i in range(1020)])  # and of decodes
    offline, tokens = run(llm, lengths, seed=1), sum(tokens for _, tokens in lengths)
    yield {"offline_s": offline, "offline_output_tokens_s": tokens / offline}
    yield {"offline_tokens_s": sum(map(sum, lengths)) / offline}
    for size in (32, 128, 256):
        yield {f"tokens_s_{size}": size / step_seconds(llm, 1024, 48, size)}


def lengths_of_chats(count: int) -> list[tuple[int, int]]:
    """Prompt and output tokens of requests whose lengths are spread like ShareGPT's."""
    rng = random.Random(7)

    def length(mean: float, most: int) -> int:
        return max(4, min(most, round(rng.lognormvariate(math.log(mean) - 0.5, 1.0))))

    return [(length(220, 1024), length(190, 1024)) for _ in range(count)]


def shortest(lengths: Sequence[tuple[int, int]], read: float, multiplied: float) -> float:
    """Seconds that such requests of the 8B shape take at least, all at once: bytes and operations a second are given.

    Each step reads the weights or multiplies by them, whichever takes longer, and reads keys and values.
    """
    parameters, token_bytes = 7.5e9, 32 * 2 * 8 * 128 * 2
    found = 2 * parameters * sum(prompt for prompt, _ in lengths) / multiplied
    for step in range(1, max(tokens for _, tokens in lengths)):
        alive = [prompt + step for prompt, tokens in lengths if tokens > step]
        found += max(2 * parameters / read, 2 * parameters * len(alive) / multiplied)
        found += sum(alive) * token_bytes / read
    return found


def eight_layers(**options: Any) -> Any:
    """An engine of as many layers of the 8B shape."""
    return engine("llama-3-8b, 8 layers", max_num_seqs=8, max_num_batched_tokens=2048, **options)


def token_ms(**options: Any) -> float:
    """Milliseconds of a token of 8 layers of the 8B shape at batch 1."""
    release()
    return step_seconds(eight_layers(**options), 128, 128, rounds=2) * 1e3


def token(seconds: float) -> Iterator[Result]:
    """Where the time of a token goes, of 8 layers of the 8B shape at batch 1: what each kernel adds to a step."""
    llm = eight_layers()
    run(llm, [(128, 8)])  # captures the graph
    yield {"rows": own_times(trace(lambda: run(llm, [(128, 48)])), "_embedding")}


def eager(seconds: float) -> Iterator[Result]:
    """A token of 8 layers of the 8B shape at batch 1, in graphs and kernel by kernel."""
    yield {"token_ms": token_ms(), "token_ms_eager": token_ms(enforce_eager=True)}


def kept(kind: str, m: int) -> Result:
    """m rows times codes as quantized checkpoints have them, and whether that is the product with their numbers."""
    import torch

    from quire import ops
    from quire.ops.grouped import expand
    from quire.quantization.base import MatrixShape
    from quire.quantization.coded import Coded

    n, k = 28672, 4096
    with torch.device(DEVICE):
        made = Coded(kind).create_weights(MatrixShape(k, n), torch.bfloat16)
        x = torch.randn(m, k, dtype=torch.bfloat16)
    codes, scales, zeros = made["codes"], made["scales"].normal_().mul_(0.01), made["zeros"].zero_()
    codes.view(torch.uint8).random_(0, 120)
    own = timed(lambda: ops.quantized_linear(x, codes, scales, zeros=zeros))
    numbers = ops.linear(x, expand(codes, scales, zeros, k).bfloat16())
    equal = torch.equal(ops.quantized_linear(x, codes, scales, zeros=zeros), numbers)
    rate = {"gb_s": codes.nbytes / own / 1e9, "tflop_s": 2 * m * n * k / own / 1e12}
    return {"kind": kind, "m": m, "own_us": own * 1e6, **rate, "equal": equal}


def quantized(seconds: float) -> Iterator[Result]:
    """Time per token at batch 1 of 8 layers of the 8B shape in int8 and int4, and products with checkpoints' codes."""
    from quire.ops.triton import install

    install("cuda")
    for kind in ("U4_128", "U8_128", "F8_128"):
        yield {"rows": [kept(kind, m) for m in (1, 4096)]}
    for name in ("int8", "int4"):
        yield {f"token_{name}_ms": token_ms(quantization=name)}


# By name, with the seconds that each may take; what comes last gets what is left.
SECTIONS: dict[str, tuple[Section, int]] = {
    "first": (first, 140),
    "engines": (engines, 140),
    "exact": (exact, 140),
    "served": (served, 90),
    "tests": (tests, 140),
    "limits": (limits, 20),
    "llama": (llama, 120),
    "products": (products, 30),
    "small": (small, 40),
    "quantized": (quantized, 45),
    "eager": (eager, 35),
    "token": (token, 35),
    "stages": (stages, 60),
}
CHECKS = ("first", "engines", "exact", "served", "tests")  # nothing in them is timed, and they leave each other memory
