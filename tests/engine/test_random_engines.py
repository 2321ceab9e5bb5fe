"""Exactness where the matrix has no line: engines and requests that dice make, through `LLM`.

Every request alone, on an engine of the same formats that is otherwise plain; then all at once, twice, on one with few
blocks, budgets, drafts, tiers, ranks or stages. What a caller sees is the same: texts, tokens, logprobs, ends.
QUIRE_NIGHTLY=1 makes many of them.
"""

import os
import random
from pathlib import Path
from typing import Any

import pytest
from dice import CITY, STOPS, words

import quire
from quire import LLM, RequestOutput, SamplingParams
from quire.errors import InvalidRequestError
from quire.lora.request import AdapterRequest, LoRARequest, PromptAdapterRequest

SEEDS = range(300) if os.environ.get("QUIRE_NIGHTLY") == "1" else range(3)
HOME = Path(quire.__file__).parent / "demo" / "adapters"
STRUCTURES = [{"regex": r"[a-z ]{5,40}\."}, {"choice": ["yes", "no é"]}, {"json": CITY}, {"json_object": True}]
DRAFTS: list[dict[str, Any]] = [
    {"method": "ngram", "num_speculative_tokens": 4},
    {"method": "suffix", "num_speculative_tokens": 5},
    {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3},
    {"method": "medusa", "model": "demo-medusa", "num_speculative_tokens": 2},
    {"method": "medusa", "model": "demo-medusa", "speculative_token_tree": "[(0,), (1,), (0, 0)]"},
    {"method": "eagle", "model": "demo-eagle", "num_speculative_tokens": 3},
    {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 3},
]
ELSEWHERE: list[dict[str, Any]] = [
    {"distributed_executor_backend": "mp"},
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
]
ADAPTERS: list[AdapterRequest | None] = [
    LoRARequest("play", 1, str(HOME / "play")),
    PromptAdapterRequest("sea", 2, str(HOME / "sea"), 20),
    LoRARequest("talk", 3, str(HOME / "talk")),
]
Asked = tuple[Any, dict[str, Any], AdapterRequest | None]
pytestmark = pytest.mark.slow


def formats(rng: random.Random) -> dict[str, Any]:
    """What an answer depends on."""
    found: dict[str, Any] = {"dtype": rng.choice(["float32", "bfloat16"]), "max_model_len": 256, "seed": 3}
    found["quantization"] = rng.choice([None, None, "int8", "int4", "w8a8", "w4a8"])
    found["kv_cache_dtype"] = rng.choice(["auto", "auto", "int8"])
    return found | dict.fromkeys(["enable_lora", "enable_prompt_adapter"], rng.random() < 0.4)


def surroundings(rng: random.Random) -> dict[str, Any]:
    """What it does not depend on."""
    size, budget = rng.choice([8, 16, 32, 64]), rng.choice([16, 37, 64, 300, 2048])
    found: dict[str, Any] = {"block_size": size, "max_num_batched_tokens": budget, "debug": True}
    found["max_num_seqs"] = min(budget, rng.choice([5, 8, 16, 256]))
    found["num_kv_blocks"] = rng.choice([1, 1, 2, 8]) * 256 // size + 1
    found["enable_prefix_caching"] = rng.random() < 0.7
    found["scheduling_policy"] = rng.choice(["fcfs", "priority", "fair", "shortest", "deadline"])
    found |= {"swap_space": 0.01} if rng.random() < 0.3 else {}
    found |= {"long_prefill_token_threshold": 16} if rng.random() < 0.3 else {}
    elsewhere = rng.choice(ELSEWHERE) if rng.random() < 0.2 else {}
    if rng.random() < 0.7:  # heads read what other stages have
        drafts = DRAFTS[:4] if "pipeline_parallel_size" in elsewhere else DRAFTS
        found["speculative_config"] = rng.choice(drafts) | {"adaptive": rng.random() < 0.3}
    return found | elsewhere


def params(rng: random.Random) -> dict[str, Any]:
    """Those of one request."""
    most = rng.choice([1, 2, 7, 20, 45])
    if rng.random() < 0.1:
        beams = {"use_beam_search": True, "n": 2, "best_of": rng.choice([2, 4]), "early_stopping": "never"}
        return {"max_tokens": most, "temperature": 0.0, "length_penalty": rng.choice([0.0, 2.0])} | beams
    drawn = {"temperature": rng.choice([0.3, 0.9, 2.0]), "seed": rng.randrange(2**32)}
    found: dict[str, Any] = {"max_tokens": most} | ({"temperature": 0.0} if rng.random() < 0.4 else drawn)
    further = {
        "top_p": rng.choice([0.2, 0.95]),
        "top_k": rng.choice([1, 17, 5000]),
        "min_p": rng.choice([0.01, 0.3]),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.choice([0.7, 1.3]),
        "logprobs": rng.choice([0, 5, 20]),
        "prompt_logprobs": rng.choice([0, 3]),
        "ignore_eos": True,
        "min_tokens": rng.randint(0, most),
        "stop": rng.sample(STOPS, 2),
        "include_stop_str_in_output": True,
        "stop_token_ids": [rng.randrange(4096) for _ in range(5)],
        "bad_words": ["the", "and the"],
        "logit_bias": {rng.randrange(4096): rng.uniform(-50, 8) for _ in range(4)},
        "allowed_token_ids": sorted(rng.sample(range(4096), rng.choice([3, 900]))),
        "truncate_prompt_tokens": rng.randint(1, 20),
        "structured_outputs": rng.choice(STRUCTURES),
        "skip_special_tokens": False,
        "speculative": False,
    }
    found |= {name: value for name, value in further.items() if rng.random() < 0.15}
    return found | ({"n": rng.choice([2, 5])} if found["temperature"] and rng.random() < 0.2 else {})


def asked(rng: random.Random, with_adapters: bool) -> list[Asked]:
    found: list[Asked] = []
    shared = [words(rng, rng.choice([8, 30, 60])) for _ in range(3)]
    for _ in range(rng.choice([14, 30])):
        ids = [rng.randrange(3, 4096) for _ in range(rng.choice([1, 31, 32, 33, 64, 100]))]
        alone = rng.choice([words(rng, rng.choice([1, 20, 60])), {"prompt_token_ids": ids}])
        prompt = alone if rng.random() < 0.5 else f"{rng.choice(shared)} {words(rng, rng.randint(0, 12))}"
        adapter = rng.choice([None, *ADAPTERS]) if with_adapters else None
        found.append((prompt, params(rng), adapter))
    return found


def answers(llm: LLM, several: list[Asked]) -> list[Any]:
    prompts = [prompt for prompt, *_ in several]
    given = [SamplingParams(**fields) for _, fields, _ in several]
    return [facts(o) for o in llm.generate(prompts, given, lora_request=[a for *_, a in several], use_tqdm=False)]


def facts(output: RequestOutput) -> Any:
    def plain(steps: Any) -> Any:
        return steps and [s and {t: (x.logprob, x.rank, x.decoded_token) for t, x in s.items()} for s in steps]

    choices = [
        (c.index, c.text, list(c.token_ids), c.cumulative_logprob, plain(c.logprobs), c.finish_reason, c.stop_reason)
        for c in output.outputs
    ]
    if ends := {c.stop_reason for c in output.outputs if c.finish_reason == "error"}:
        return output.prompt_token_ids, ends  # how far it had come is not the request's alone
    return output.prompt_token_ids, plain(output.prompt_logprobs), choices


def fits(llm: LLM, one: Asked) -> bool:
    """Whether an engine of so few blocks takes it."""
    try:
        llm.llm_engine.add_request("probe", one[0], SamplingParams(**one[1]), lora_request=one[2])
        llm.llm_engine.abort_request(["probe"])
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
    except InvalidRequestError as error:
        if "can never fit" in str(error) or "beams are more" in str(error):
            return False
        raise
    return True


@pytest.mark.parametrize("seed", SEEDS)
def test_answers_depend_on_the_request_alone(seed: int) -> None:
    rng = random.Random(seed)
    common, further = formats(rng), surroundings(rng)
    llm = LLM("demo", **common, **further)
    several = [one for one in asked(rng, common["enable_lora"]) if fits(llm, one)]
    plain = LLM("demo", **common, enable_prefix_caching=False)
    expected = [answers(plain, [one])[0] for one in several]
    for _ in range(2):
        for one, got, alone in zip(several, answers(llm, several), expected, strict=True):
            assert got == alone, (seed, common, further, one)
    llm.llm_engine.check_integrity()
    for used in (llm, plain):
        used.llm_engine.shutdown()
