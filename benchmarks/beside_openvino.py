"""Single tokens and prompts of Quire and of OpenVINO GenAI, both alive, in turn: machines change speed in seconds.

    python benchmarks/beside_openvino.py MODEL OPENVINO_PYTHON OPENVINO_MODEL

MODEL is a folder of weights, OPENVINO_MODEL the same as `optimum-cli export openvino` writes it, OPENVINO_PYTHON the
interpreter of an environment with openvino-genai. Prints each round and the median of the rounds' ratios.
"""

import os
import statistics
import subprocess
import sys

CASES = ((128, 33, 16), (1024, 1, 8))  # prompt tokens, output tokens (above 1: the time of one after the first), rounds
_QUIRE = """
import sys
from quire import LLM, SamplingParams
llm = LLM(model=sys.argv[1], dtype="bfloat16", max_model_len=4096, max_num_seqs=64, enable_prefix_caching=False)
def generate(prompt, length):
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
"""
_OPENVINO = """
import sys
import numpy as np, openvino as ov, openvino_genai as genai
scheduler = genai.SchedulerConfig()
scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 4, 512, 64
scheduler.enable_prefix_caching = False
pipe = genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", {})
def generate(prompt, length):
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample, config.apply_chat_template = length, True, False, False
    pipe.generate([ov.Tensor(np.array([prompt], dtype=np.int64))], [config])
"""
_LOOP = """
import random, time
draw = random.Random(0)
def timed(num_tokens, length):
    prompt = [draw.randrange(3, 100_000) for _ in range(num_tokens)]
    start = time.perf_counter()
    generate(prompt, length)
    return time.perf_counter() - start
timed(32, 8)
for line in sys.stdin:
    num_tokens, length = map(int, line.split())
    seconds = timed(num_tokens, 1)
    if length > 1:
        seconds = (timed(num_tokens, length) - seconds) / (length - 1)
    print("took", seconds, flush=True)
"""


class Engine:
    """A process that times what it is asked to."""

    def __init__(self, python: str, code: str, model: str) -> None:
        self._process = subprocess.Popen(
            [python, "-c", code + _LOOP, model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
        )

    def milliseconds(self, num_tokens: int, length: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(num_tokens, length, file=self._process.stdin, flush=True)
        for line in self._process.stdout:  # the engine may print, too
            if line.startswith("took "):
                return float(line.split()[1]) * 1e3
        raise RuntimeError("the engine has ended; run its code by hand to see why")


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    model, python, exported = sys.argv[1:]
    pair = Engine(sys.executable, _QUIRE, model), Engine(python, _OPENVINO, exported)
    for num_tokens, length, rounds in CASES:
        found: list[list[float]] = [[], []]
        for number in range(rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                found[which].append(pair[which].milliseconds(num_tokens, length))
        ratio = statistics.median(other / own for own, other in zip(*found, strict=True))
        print(f"{num_tokens} tokens, {length} to generate: OpenVINO GenAI takes {ratio:.2f} times as long")
        for name, times in zip(("Quire", "OpenVINO"), found, strict=True):
            print(f"  {name} {statistics.median(times):.1f} ms:", *(f"{one:.1f}" for one in times))


if __name__ == "__main__":
    main()
