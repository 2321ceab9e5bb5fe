"""What the server costs beside the model: python benchmarks/server.py MODEL [--input-len 32 --output-len 256]

The same work three ways, in turn: `LLM` offline, and 32 concurrent streams from a server whose engine is a process or a
thread. Before each measurement 32 requests warm it up. Prints output tokens per second, latencies, and the processor
time of front end and engine per streamed token (a thread's engine counts with its front end).
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

CONCURRENCY = 32


def offline(args: argparse.Namespace) -> str:
    """Run in a child, so that its memory is as fresh as a server's."""
    from quire import LLM, SamplingParams

    llm = LLM(args.model, max_num_seqs=CONCURRENCY)
    params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=args.output_len)

    def run(seed: int, count: int) -> float:
        draw = random.Random(seed)
        vocabulary = range(llm.model_config.vocab_size)
        prompts = [{"prompt_token_ids": draw.choices(vocabulary, k=args.input_len)} for _ in range(count)]
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    run(1, CONCURRENCY)
    return f"{args.num_prompts * args.output_len / run(0, args.num_prompts):10,.1f} tokens/s"


def served(args: argparse.Namespace, engine: str) -> str:
    command = [sys.executable, "-m", "quire", "serve", args.model, "--port", str(args.port), "--engine", engine]
    with subprocess.Popen([*command, "--log-level", "warning"]) as server:
        try:
            wait_for(f"http://127.0.0.1:{args.port}/health")
            bench(args, CONCURRENCY, seed=1)
            processes = [server.pid, *children(server.pid)]
            before = [cpu_seconds(pid) for pid in processes]
            figures = bench(args, args.num_prompts, seed=0)
            spent = [cpu_seconds(pid) - start for pid, start in zip(processes, before, strict=True)]
        finally:
            server.terminate()
    tokens = figures["total_output_tokens"]
    shown = ", ".join(f"{seconds / tokens * 1e6:.1f}" for seconds in spent)
    return (
        f"{figures['output_throughput']:10,.1f} tokens/s; TTFT {figures['mean_ttft_ms']:.1f}, TPOT "
        f"{figures['mean_tpot_ms']:.2f}, ITL p99 {figures['p99_itl_ms']:.2f} ms; processor time {shown} us a token"
    )


def bench(args: argparse.Namespace, count: int, seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "figures.json"
        lengths = ["--random-input-len", str(args.input_len), "--random-output-len", str(args.output_len)]
        command = [sys.executable, "-m", "quire", "bench", "serve", "--port", str(args.port), *lengths]
        command += ["--num-prompts", str(count), "--max-concurrency", str(CONCURRENCY), "--seed", str(seed)]
        subprocess.run([*command, "--output-json", str(output)], check=True, capture_output=True)
        return json.loads(output.read_text())


def wait_for(url: str) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(url).close()
            return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError("the server did not start within a minute")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    for name, default in (("num-prompts", 256), ("input-len", 32), ("output-len", 256), ("rounds", 2), ("port", 8321)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.offline:
        return print(offline(args))
    for _ in range(args.rounds):
        again = subprocess.run([sys.executable, *sys.argv, "--offline"], check=True, capture_output=True, text=True)
        print(f"{'offline':10}{again.stdout.strip():>20}", flush=True)
        for engine in ("process", "thread"):
            print(f"{engine:10}{served(args, engine)}", flush=True)
    return None


if __name__ == "__main__":
    main()
