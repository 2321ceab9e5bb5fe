"""speculative_config, read and refused by name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine_args import EngineArgs
from quire.config.families import drafting_method
from quire.config.speculative import SpeculativeConfig
from quire.entrypoints.cli.main import main
from quire.errors import ConfigError, NotYetSupportedError, QuireError
from quire.utils.hub import resolve_model_path

DRAFT_MODEL = {"method": "draft_model", "model": "demo-draft"}
TYPICAL = {"method": "ngram", "acceptance": "typical"}


def test_thresholds_have_medusas_defaults() -> None:
    def rule(**given: Any) -> tuple[float | None, float]:
        config = SpeculativeConfig.read({"method": "ngram"} | given)
        return config.threshold, config.alpha

    assert rule(acceptance="typical") == (0.09, 0.3)
    assert rule(acceptance="typical", posterior_threshold=0.25) == (0.25, 0.5)
    assert rule(acceptance="typical", posterior_threshold=0.25, posterior_alpha=0.1) == (0.25, 0.1)
    assert rule()[0] is rule(acceptance="rejection")[0] is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "oracle"}, "speculative_config: method must be one of 'ngram', 'suffix', 'draft_model'"),
        ({"method": ["ngram"]}, "speculative_config: method must be one of"),
        ({}, "speculative_config needs 'method'"),
        ({"num_speculative_tokens": 3}, "speculative_config needs 'method'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "an integer, from 1 to 32, got 0"),
        ({"method": "ngram", "num_speculative_tokens": 1000}, "from 1 to 32, got 1000"),
        ({"method": "ngram", "num_speculative_tokens": 2.5}, "from 1 to 32, got 2.5"),
        ({"method": "ngram", "num_speculative_tokens": True}, "from 1 to 32, got True"),
        ({"method": "ngram", "num_spec_tokens": 3}, "no option 'num_spec_tokens'. Did you mean 'num_spec"),
        ({"method": "ngram", "acceptance": "sloppy"}, "acceptance must be one of 'exact', 'rejection', 'typical', got"),
        ({"method": "ngram", "posterior_threshold": 0.1}, "posterior_threshold is for the acceptance 'typical', not"),
        (TYPICAL | {"posterior_threshold": 0}, "posterior_threshold must be a number, over 0, at most 1, got 0"),
        (TYPICAL | {"posterior_alpha": 1.5}, "posterior_alpha must be a number, over 0, at most 1, got 1.5"),
        (TYPICAL | {"posterior_alpha": "high"}, "posterior_alpha must be a number, over 0, at most 1, got 'high'"),
        (TYPICAL | {"method": "eagle", "model": "demo-eagle"}, "'typical' is refused with the method 'eagle'"),
        (TYPICAL | {"adaptive": True}, "adaptive=True is refused with the acceptance 'typical'"),
        (TYPICAL | {"disable_by_batch_size": 8}, "disable_by_batch_size=8 is refused with the acceptance 'typical'"),
        (
            TYPICAL | {"method": "suffix", "suffix_decoding_max_cached_requests": 9},
            "suffix_decoding_max_cached_requests=9 is refused with the acceptance 'typical'",
        ),
        (
            TYPICAL | {"method": "medusa", "model": "demo-medusa", "speculative_token_tree": "[(0,)]"},
            "speculative_token_tree='[(0,)]' is refused with the acceptance 'typical'",
        ),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_min=5 is above"),
        ({"method": "draft_model", "model": "demo-draft", "draft_tensor_parallel_size": 2}, "draft_tensor"),
        ({"method": "suffix", "prompt_lookup_min": 2}, "prompt_lookup_min is for the method 'ngram', not 'suffix'"),
        ({"method": "draft_model"}, "the method 'draft_model' needs 'model'"),
        ({"method": "ngram", "model": "x"}, "model is for the methods 'draft_model', 'medusa', 'eagle', 'eagle3', not"),
        ({"method": "medusa"}, "the method 'medusa' needs 'model'"),
        ({"method": "medusa", "model": "demo-medusa", "prompt_lookup_max": 2}, "for the method 'ngram', not"),
        ({"method": "draft_model", "model": "demo-draft", "quantization": "int3"}, "quantization must be one of"),
        (DRAFT_MODEL | {"quantization": 8}, "quantization must be one of None, 'int8', 'int4', got 8"),
        (DRAFT_MODEL | {"num_threads": 0}, "num_threads must be an integer, from 1 to 256, got 0"),
        (DRAFT_MODEL | {"num_threads": -2}, "num_threads must be an integer, from 1 to 256, got -2"),
        (DRAFT_MODEL | {"num_threads": 10_000}, "num_threads must be an integer, from 1 to 256, got 10000"),
        (DRAFT_MODEL | {"num_threads": "two"}, "num_threads must be an integer, from 1 to 256, got 'two'"),
        ({"method": "suffix", "num_threads": 2}, "num_threads is for the methods 'draft_model', 'medusa', 'eagle', "),
        ({"method": "ngram", "speculative_token_tree": "[(0,)]"}, "methods 'medusa', 'eagle', 'eagle3', not 'ngram'"),
        ({"method": "suffix", "speculative_token_tree": "[(0,"}, "must be the text of a list of tuples of choices"),
        ({"method": "ngram", "speculative_token_tree": [[0]]}, "speculative_token_tree must be a text, got [[0]]"),
        ({"method": "ngram", "disable_by_batch_size": 0}, "disable_by_batch_size must be an integer, at least 1"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineArgs(speculative_config=given)
    assert message in str(caught.value)
    assert str(caught.value).startswith("speculative_config")


def test_vllms_options_that_ask_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """As its example of speculative decoding gives them."""
    nothing = {"disable_padded_drafter_batch": False, "parallel_drafting": False, "enforce_eager": True}
    args = EngineArgs(speculative_config=DRAFT_MODEL | nothing | {"rejection_sample_method": "standard"})
    assert args.speculative_config == DRAFT_MODEL
    assert not caplog.messages
    args = dataclasses.replace(EngineArgs(speculative_config=DRAFT_MODEL | {"max_model_len": 64}))
    assert args.resolve().speculative == SpeculativeConfig(**DRAFT_MODEL)
    assert caplog.messages == [
        "speculative_config: max_model_len has no effect: drafts reach as far as the model's context."
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parallel_drafting": True}, "speculative_config: parallel_drafting is not supported yet: drafts follow"),
        ({"draft_model_config": {"hf_config": {}, "x": 1}}, "speculative_config: draft_model_config is not supported"),
        ({"kv_cache_dtype": "fp8"}, "speculative_config: kv_cache_dtype has one value here, 'auto'. Leave it out."),
    ],
)
def test_vllms_options_that_are_not_there(given: dict[str, Any], message: str) -> None:
    with pytest.raises(NotYetSupportedError, match=f"^{message}"):
        EngineArgs(speculative_config=DRAFT_MODEL | given)


@pytest.mark.parametrize("given", ["ngram", '{"method": "ngram"', '{"method": "ngram"}', ["ngram"], 3])
def test_what_is_no_object_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineArgs(speculative_config=given)
    assert str(caught.value) == f"speculative_config must be an object of keys and values, got {given!r}."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"method": "ngram"', "not valid JSON (Expecting ',' delimiter: line 1 column 19 (char 18)): "),
        ("ngram", "not valid JSON (Expecting value: line 1 column 1 (char 0)): 'ngram'"),
        ('["ngram"]', "must be a JSON object such as '{\"key\": 1}', got '[\"ngram\"]'"),
        ('{"method": "nigram"}', "speculative_config: method must be one of 'ngram', "),
    ],
)
def test_a_flag_that_is_no_object_of_json_is_refused(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["generate", "demo", "--prompt", "x", "--speculative-config", text])
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr().err
    assert code == 2
    assert message in said
    assert len(said.splitlines()) <= 2
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("demo-draft", "draft_model"),
        ("demo-medusa", "medusa"),
        ("demo-eagle", "eagle"),
        ("demo-eagle3", "eagle3"),
        ("[ngram]", "ngram"),
        ("ngram", "ngram"),
    ],
)
def test_the_method_follows_from_the_model_where_none_is_named(model: str, method: str) -> None:
    for given in ({"model": model}, {"model": model, "method": None}):
        found = EngineArgs(speculative_config={"num_speculative_tokens": 3} | given).resolve()
        assert found.speculative == SpeculativeConfig.read(
            {"method": method, "num_speculative_tokens": 3} | ({} if method == "ngram" else {"model": model})
        )
        assert (found.draft is None) == (method in ("ngram", "medusa"))
        assert (found.heads is None) == (method != "medusa")


@pytest.mark.parametrize(
    ("name", "config", "method"),
    [
        ("a", {"medusa_num_heads": 3, "base_model_name_or_path": "lmsys/vicuna-7b"}, "medusa"),
        ("a", {"model_type": "medusa", "num_heads": 3}, "medusa"),
        ("a", {"model_type": "eagle", "architectures": ["EagleLlamaForCausalLM"]}, "eagle"),
        ("a", {"model_type": "eagle", "draft_vocab_size": 32000}, "eagle3"),
        ("a", {"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ("a", {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, "eagle3"),
        ("yuhuili/EAGLE-LLaMA3-Instruct-8B", {"architectures": ["LlamaForCausalLM"]}, "eagle"),
        ("AngelSlim/Qwen3-8B_eagle3", {"architectures": ["LlamaForCausalLM"]}, "eagle3"),
        ("Qwen/Qwen3-0.6B", {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "draft_model"),
        ("a", {"architectures": 5, "model_type": None}, "draft_model"),
    ],
)
def test_published_forms_of_heads_are_known(name: str, config: dict[str, Any], method: str) -> None:
    assert drafting_method(None, config, name) == method
    assert drafting_method(method, config, name) == method


def test_options_are_held_against_the_method_that_was_found() -> None:
    tree = {"model": "demo-draft", "speculative_token_tree": "[(0,)]"}
    with pytest.raises(ConfigError, match="for the methods 'medusa', 'eagle', 'eagle3', not 'draft_model'"):
        EngineArgs(speculative_config=tree).resolve()
    with pytest.raises(ConfigError, match="prompt_lookup_max is for the method 'ngram', not 'medusa'"):
        EngineArgs(speculative_config={"model": "demo-medusa", "prompt_lookup_max": 3}).resolve()
    with pytest.raises(ConfigError, match="speculative_config: model must be a text, got 3"):
        EngineArgs(speculative_config={"model": 3})
    with pytest.raises(QuireError, match="^speculative_config: Model directory '/no/such/heads' does not exist"):
        EngineArgs(speculative_config={"model": "/no/such/heads"}).resolve()
    config = EngineArgs(speculative_config={"method": "ngram", "model": None}).resolve().speculative
    assert config == SpeculativeConfig.read({"method": "ngram"})


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_damaged_config_of_what_drafts_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    for method in (None, "medusa", "eagle", "draft_model"):
        with pytest.raises(QuireError, match=r"config.json of model .* (is not valid JSON|must hold a JSON object)"):
            EngineArgs(speculative_config={"method": method, "model": str(tmp_path)}).resolve()


@pytest.mark.parametrize(
    ("given", "bounds"), [({}, (2, 4)), ({"min": 6}, (6, 6)), ({"max": 1}, (1, 1)), ({"min": 3, "max": 8}, (3, 8))]
)
def test_lookup_bounds(given: dict[str, int], bounds: tuple[int, int]) -> None:
    config = SpeculativeConfig.read({"method": "ngram"} | {f"prompt_lookup_{k}": v for k, v in given.items()})
    assert (config.lookup_min, config.lookup_max) == bounds


def test_it_reaches_scheduler_and_worker() -> None:
    config = EngineArgs(speculative_config={"method": "suffix", "num_speculative_tokens": 7}).resolve()
    assert config.scheduler.max_num_drafts == 7
    assert config.speculative is not None
    assert config.speculative.method == "suffix"
    assert EngineArgs().resolve().speculative is None


def test_draft_models_are_held_against_the_model(tmp_path: Path) -> None:
    config = json.loads((resolve_model_path("demo-draft") / "config.json").read_text())
    for change, message in (
        ({"vocab_size": 4095}, "has a vocabulary of 4095 tokens, and the model 'demo' one of 4096"),
        ({"max_position_embeddings": 256}, "has a context of 256 tokens, shorter than max_model_len=512"),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64}, "sliding window"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        given = {"method": "draft_model", "model": str(tmp_path)}
        with pytest.raises(ConfigError, match=message):
            EngineArgs(speculative_config=given, load_format="dummy").resolve()
    wide = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 512}
    (tmp_path / "config.json").write_text(json.dumps(config | wide))
    given = {"method": "draft_model", "model": str(tmp_path), "draft_tensor_parallel_size": 1}
    EngineArgs(speculative_config=given, load_format="dummy").resolve()


def test_a_draft_model_that_is_not_there_is_named() -> None:
    args = EngineArgs(speculative_config={"method": "draft_model", "model": "/no/such/model"})
    with pytest.raises(QuireError, match="^speculative_config: Model directory '/no/such/model' does not exist"):
        args.resolve()
