"""lm-evaluation-harness, `local-completions`: a task of each kind; loglikelihoods are those of the offline `LLM`."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import harness

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_OFFLINE="1")

import lm_eval
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

TASKS = Path(__file__).parent / "lm_eval_tasks"
COMMON = {"model": "demo", "base_url": f"{harness.URL}/v1/completions", "max_length": 512, "max_retries": 1}
BY_TOKENS = {"tokenizer": harness.TOKENIZER, "tokenizer_backend": "huggingface", "add_bos_token": True}
BY_TEXT = {"tokenizer_backend": None, "tokenized_requests": False}
AT_ONCE = {"num_concurrent": 4, "batch_size": 4}


class ProgramBuilder(LocalCompletionsAPI):
    """Keeps what it was asked, in tokens, and what it answered."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**COMMON, **options)
        self.scores: list[tuple[list[int], list[int], float, bool]] = []

    def _loglikelihood_tokens(self, requests: Any, **options: Any) -> list[tuple[float, bool]]:
        results = super()._loglikelihood_tokens(requests, **options)
        for (_, context, continuation), (score, is_greedy) in zip(requests, results, strict=True):
            self.scores.append((context, continuation, score, is_greedy))
        return results


def evaluate(model: ProgramBuilder, *tasks: str) -> Any:
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    names = [f"quire_{task}" for task in tasks]
    return lm_eval.simple_evaluate(model=model, tasks=names, task_manager=manager, bootstrap_iters=0)


def check_scores(model: ProgramBuilder) -> None:
    requests = [[context, continuation] for context, continuation, _, _ in model.scores]
    command = [harness.PYTHON, str(Path(__file__).with_name("offline_logprobs.py"))]
    output = subprocess.run(command, input=json.dumps(requests), stdout=subprocess.PIPE, text=True, check=True).stdout
    expected = json.loads(output)
    told = [[score, is_greedy] for _, _, score, is_greedy in model.scores]
    assert len(told) >= 20
    assert told == expected, [pair for pair in zip(told, expected, strict=True) if pair[0] != pair[1]]
    assert len({is_greedy for _, is_greedy in told}) == 2, "both kinds occur"


def loglikelihoods() -> None:
    model = ProgramBuilder(**BY_TOKENS)
    results = evaluate(model, "choice", "rolling")["results"]
    assert results["quire_choice"]["acc,none"] >= 0.8, results
    assert results["quire_rolling"]["bits_per_byte,none"] > 0
    check_scores(model)


def loglikelihoods_at_once_by_the_servers_tokenizer() -> None:
    model = ProgramBuilder(**AT_ONCE)
    assert model.tokenizer_backend == "remote"
    evaluate(model, "choice", "rolling")
    check_scores(model)


def generations() -> None:
    by_tokens, by_text, at_once = (
        generated(ProgramBuilder(**options)) for options in (BY_TOKENS, BY_TEXT, {**BY_TOKENS, **AT_ONCE})
    )
    assert by_tokens == by_text == at_once
    assert all(text and "." not in text and "\n" not in text for text in by_tokens), by_tokens


def generated(model: ProgramBuilder) -> list[str]:
    samples = evaluate(model, "generate")["samples"]["quire_generate"]
    return [sample["resps"][0][0] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]


if __name__ == "__main__":
    os.chdir(TASKS)  # the tasks name their data from here
    harness.run(loglikelihoods, loglikelihoods_at_once_by_the_servers_tokenizer, generations)
