"""Long prompts and many short chats, for the scripts that time Quire and its peers on one set of workloads.

    python benchmarks/more_workloads.py PEERS/run_llamacpp.py MODEL.gguf
    python benchmarks/more_workloads.py PEERS/run_vllm_api.py quire MODEL_DIR max_model_len=33000

Each of those scripts hands what `workloads.workloads()` yields to its engine; here it yields one prompt of 8,192 and
one of 32,768 tokens, 64 chats at once (24 to 96 tokens, 32 to 96 to answer), and what a time per token is made of.
WORKLOADS=chats64,p8192 chooses. The model's context must hold them.
"""

import os
import random
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VOCAB = 100_000
Workload = tuple[str, list[list[int]], list[int]]


def more_workloads() -> Iterator[Workload]:
    """(name, prompts of token ids, tokens to generate) of each."""
    rng = random.Random(1)

    def ids(count: int) -> list[int]:
        return [rng.randrange(3, VOCAB) for _ in range(count)]

    every: list[Workload] = [
        ("chats64", [ids(rng.randrange(24, 97)) for _ in range(64)], [rng.randrange(32, 97) for _ in range(64)]),
        ("p8192", [ids(8192)], [1]),
        ("p32768", [ids(32768)], [1]),
    ]
    chosen = os.environ.get("WORKLOADS")
    yield "warm", [ids(32)], [8]
    yield "b1_p128_o1", [ids(128)], [1]
    yield "b1_p128_o65", [ids(128)], [65]
    yield from (one for one in every if chosen is None or one[0] in chosen.split(","))


def _more_room_in_llama() -> None:
    """The script's context holds 32 sequences of 32,768 tokens in all: one long prompt and its answer need more."""
    import llama_cpp  # pyright: ignore[reportMissingImports]

    make = llama_cpp.llama_init_from_model

    def with_room(model: Any, parameters: Any) -> Any:
        parameters.n_ctx, parameters.n_seq_max = 33792, 64
        return make(model, parameters)

    llama_cpp.llama_init_from_model = with_room


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    script = Path(sys.argv[1])
    sys.path.insert(0, str(script.parent))
    import workloads  # pyright: ignore[reportMissingImports]

    workloads.workloads = more_workloads
    if "llama" in script.name:
        _more_room_in_llama()
    sys.argv = [str(script), *sys.argv[2:]]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
