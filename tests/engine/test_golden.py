"""The really trained 260K Llama: text in, golden tokens, text and logprobs out, through the whole engine."""

import json
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.ops.native.library import levels


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7, "block_size": 4}], ids=["default", "chunked"])
@pytest.mark.parametrize("kernels", levels())
def test_golden_tokens_text_and_logprobs(shared_data: Path, kernels: str, options: dict[str, int]) -> None:
    model = shared_data / "models" / "stories260K"
    golden = json.loads((model / "golden_greedy_fp32.json").read_text())
    llm = LLM(model=str(model), debug=True, max_num_seqs=4, show_progress=False, kernels=kernels, **options)
    # The golden steps go on past an end-of-sequence token.
    params = SamplingParams(temperature=0, max_tokens=64, logprobs=5, ignore_eos=True)
    prompts = [case["prompt"] or case["prompt_token_ids"] for case in golden]
    for case, output in zip(golden, llm.generate(prompts, params, use_tqdm=False), strict=True):
        completion = output.outputs[0]
        assert output.prompt_token_ids == case["prompt_token_ids"]
        assert list(completion.token_ids) == case["greedy_token_ids"]
        assert completion.text.strip() == case["greedy_text"].strip()
        assert completion.logprobs is not None
        for step, expected in zip(completion.logprobs, case["top5_logprobs"], strict=True):
            ranked = sorted(step.items(), key=lambda item: item[1].rank or 0)
            assert [token for token, _ in ranked] == [token for token, _ in expected]
            assert [x.logprob for _, x in ranked] == pytest.approx([x for _, x in expected], abs=1e-4)


def test_it_stops_where_its_generation_config_says(shared_data: Path) -> None:
    llm = LLM(model=str(shared_data / "models" / "stories260K"), show_progress=False)
    params = SamplingParams(temperature=0, max_tokens=400)
    (output,) = llm.generate("Once upon a time", params, use_tqdm=False)
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", 1), "not config.json's own id, so it is named"
    assert completion.token_ids[-1] in (1, 2)
    assert completion.text.rstrip().endswith((".", "!", '"'))
