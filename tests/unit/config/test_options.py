"""Options are declared once: what their fields say is what is checked, shown and made into flags."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

import numpy as np
import pytest
import torch

from quire.config.engine_args import EngineArgs
from quire.config.options import check_options, choices_of, option, option_of
from quire.config.speculative import SpeculativeConfig
from quire.entrypoints.cli.flags import documentation
from quire.entrypoints.cli.load.options import LoadArgs
from quire.entrypoints.not_yet import engine_args
from quire.entrypoints.server.options import ServerArgs
from quire.errors import ConfigError, ModelLoadError, NotYetSupportedError
from quire.sampling_params import SamplingParams


@dataclass(frozen=True)
class Some:
    """One option of each kind."""

    count: int = option(1, 1)
    """Count."""
    share: float | None = option(None, most=1, over=0)
    """Share."""
    rate: float = option(1.0, 0.5, math.inf)
    """Rate."""
    port: int | None = option(None, 0, 65535)
    """Port."""
    free: int = option(0)
    """Any."""
    name: Literal["a", "b"] | None = option(None)
    """Name."""
    flag: bool = option(False)
    """Flag."""
    names: list[str] = option(["x"])
    """Names."""
    key: str = option("sesame", secret=True)
    """Key."""
    facts: dict[str, Any] | None = option(None)
    """Facts."""

    def __post_init__(self) -> None:
        check_options(self)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "count must be an integer, at least 1, got 0."),
        ({"count": True}, "count must be an integer, at least 1, got True."),
        ({"count": 1.0}, "count must be an integer, at least 1, got 1.0."),
        ({"count": None}, "count must be an integer, at least 1, got None."),
        ({"count": "1"}, "count must be an integer, at least 1, got '1'."),
        ({"share": 0}, "share must be a number, over 0, at most 1, got 0."),
        ({"share": 1.5}, "share must be a number, over 0, at most 1, got 1.5."),
        ({"share": math.nan}, "share must be a number, over 0, at most 1, got nan."),
        ({"rate": 0.1}, "rate must be a number, at least 0.5, got 0.1."),
        ({"rate": math.nan}, "rate must be a number, at least 0.5, got nan."),
        ({"port": 65536}, "port must be an integer, from 0 to 65535, got 65536."),
        ({"free": "x"}, "free must be an integer, got 'x'."),
        ({"name": "c"}, "name must be one of None, 'a', 'b', got 'c'."),
        ({"name": np.array(["a", "b"])}, "name must be one of None, 'a', 'b', got array(['a', 'b'], dtype='<U1')."),
        ({"flag": "false"}, "flag must be True or False, got 'false'."),
        ({"names": "x"}, "names must be a list of texts, got 'x'."),
        ({"names": None}, "names must be a list of texts, got None."),
        ({"key": 5}, "key must be a text, got a int."),
        ({"key": "a\0b"}, "key has a NUL character, which no name and no file has: a str."),
        ({"facts": [1]}, "facts must be an object of keys and values, got [1]."),
    ],
)
def test_what_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Some(**values)
    assert str(refusal.value) == message


def test_what_is_taken() -> None:
    assert Some(share=1, rate=math.inf, port=0, name="a", free=-5).names == ["x"]
    assert "sesame" not in repr(Some())


@dataclass(frozen=True)
class Others:
    """Some options of another class, and one whose docstring is of two lines."""

    count: int = option_of(Some, "count")
    more: int = option(2, 1)
    """More,
    and more."""


def test_docstrings_are_the_documentation() -> None:
    assert documentation(Others) == {"count": "Count.", "more": "More, and more."}
    built = type("Built", (Others,), {"__module__": "builtins"})  # of which Python has no source
    assert documentation(dataclasses.dataclass(frozen=True)(built)) == {"count": "Count.", "more": ""}


@pytest.mark.parametrize("options", [EngineArgs, ServerArgs, LoadArgs])
def test_every_option_is_declared_by_one_function(options: type) -> None:
    hints, texts = get_type_hints(options), documentation(options)
    for field in dataclasses.fields(options):
        assert {"least", "most"} <= field.metadata.keys(), field.name
        assert texts[field.name].endswith((".", ")")), "a docstring, a sentence"
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        assert not choices_of(hints[field.name]) or default in choices_of(hints[field.name])


def test_options_of_vllm_that_are_not_there_are_named() -> None:
    with pytest.raises(NotYetSupportedError, match="^enable_dbo is not supported: a step is one batch. Use pipeline_p"):
        engine_args(enable_dbo=True)
    with pytest.raises(NotYetSupportedError, match="cpu_kvcache_space is not an option here: give kv_cache_memory"):
        engine_args(cpu_kvcache_space=4)
    with pytest.raises(ConfigError, match="unknown engine argument 'max_modl_len'. Did you mean 'max_model_len'?"):
        engine_args(max_modl_len=4)


def test_other_names_of_vllm() -> None:
    assert engine_args(num_gpu_blocks_override=4) == EngineArgs(num_kv_blocks=4)
    assert engine_args(kv_cache_memory_bytes=1 << 20) == EngineArgs(kv_cache_memory=1 << 20)
    with pytest.raises(ConfigError, match="^num_kv_blocks/num_gpu_blocks_override must be .* at least 1, got 0"):
        engine_args(num_gpu_blocks_override=0)
    with pytest.raises(ConfigError, match="num_gpu_blocks_override and num_kv_blocks are two names of one option"):
        engine_args(num_gpu_blocks_override=4, num_kv_blocks=4)
    with pytest.raises(ConfigError, match="stream_interval must be an integer, at least 1, got 0"):
        EngineArgs(stream_interval=0)


def test_none_is_the_default() -> None:
    """As vLLM has it: scripts hand on what their own flags left open."""
    given = ("seed", "max_num_seqs", "block_size", "enable_prefix_caching", "max_model_len", "scheduling_policy")
    assert engine_args(**dict.fromkeys(given)) == EngineArgs()


def test_defaults_of_requests_are_overridden() -> None:
    def params(**options: Any) -> SamplingParams:
        return EngineArgs(model="demo", **options).resolve().default_sampling_params()

    own, given = params(), {"temperature": 0.25, "max_new_tokens": 7}
    changed = params(override_generation_config=given)
    assert (changed.temperature, changed.max_tokens, changed.top_p) == (0.25, 7, own.top_p)
    neutral = params(override_generation_config={"top_k": 3}, generation_config="vllm")
    assert neutral == SamplingParams(top_k=3)
    with pytest.raises(ConfigError, match="override_generation_config: 'temprature' is none of temperature, top_p"):
        params(override_generation_config={"temprature": 1})
    with pytest.raises(ConfigError, match="override_generation_config: temperature must be"):
        params(override_generation_config={"temperature": -1})


def test_defaults_of_requests_are_taken_from_elsewhere(tmp_path: Path) -> None:
    """From a folder or a file, in place of the model's; what ends a text there does so besides what the model has."""
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.25, "eos_token_id": [4, 9]}')
    own = EngineArgs(model="demo").resolve()
    for source in (tmp_path, str(file)):
        config = EngineArgs(model="demo", generation_config=source, override_generation_config={"top_k": 3}).resolve()
        assert config.default_sampling_params() == SamplingParams(temperature=0.25, top_k=3)
        assert config.model.eos_token_ids == (*own.model.eos_token_ids, 9)
    neutral = EngineArgs(model="demo", generation_config="vllm").resolve()
    assert neutral.model.eos_token_ids == own.model.eos_token_ids
    for nowhere in ("vlm", str(tmp_path / "nowhere"), "x" * 5000):
        message = "^generation_config='.* is neither 'auto' nor 'vllm', nor a folder with generation_config.json.$"
        with pytest.raises(ConfigError, match=message) as error:
            EngineArgs(model="demo", generation_config=nowhere).resolve()
        assert len(str(error.value)) < 400
    file.write_text("[")
    with pytest.raises(ModelLoadError, match="generation_config.json of .* is not valid JSON"):
        EngineArgs(model="demo", generation_config=str(tmp_path)).resolve()


@pytest.mark.parametrize(
    ("name", "most"),
    [("data_parallel_size", 1024), ("max_num_seqs", 10**5), ("max_loras", 10**4), ("max_prompt_adapters", 10**4)],
)
def test_engines_that_no_machine_has(name: str, most: int) -> None:
    """Each has arrays of that length: no error of an allocation is to tell what there may be."""
    given: dict[str, Any] = {name: 2**62}
    with pytest.raises(ConfigError, match=f"^{name} must be an integer, from 1 to {most}, got {2**62}.$"):
        EngineArgs(**given)


def test_kv_events_are_read_before_a_model_is() -> None:
    with pytest.raises(ConfigError, match="^kv_events_config: publisher must be one of 'zmq', 'null', got 'kafka'"):
        EngineArgs(model="demo", kv_events_config={"publisher": "kafka"}).resolve()


def test_prompts_may_share_a_step() -> None:
    resolved = EngineArgs(model="demo", long_prefill_token_threshold=64).resolve()
    assert resolved.scheduler.long_prefill_token_threshold == 64
    with pytest.raises(ConfigError, match="long_prefill_token_threshold=64 cuts prompts"):
        EngineArgs(model="demo", long_prefill_token_threshold=64, enable_chunked_prefill=False).resolve()


def test_options_of_vllms_scripts_are_taken_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    EngineArgs(enforce_eager=True, swap_space=4)
    assert caplog.text == ""


@pytest.mark.parametrize("option", ["kv_cache_dir", "model", "tokenizer", "download_dir"])
def test_a_path_with_a_nul_is_refused(option: str) -> None:
    """The system would say 'embedded null byte', in the middle of a start."""
    given: dict[str, Any] = {option: "a\0b"}
    with pytest.raises(ConfigError, match=rf"^{option} has a NUL character, .*: 'a\\x00b'.$"):
        EngineArgs(**given)


NOWHERE = "~nobody-is-called-so/x"


@pytest.mark.parametrize(("kind", "option"), [(EngineArgs, "kv_cache_dir"), (ServerArgs, "allowed_adapter_dir")])
def test_a_home_that_nobody_has_is_refused(kind: Any, option: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{option}: '{NOWHERE}' is in a home that nobody has; give the whole path"):
        kind(**{option: NOWHERE})


def test_paths_are_texts(tmp_path: Path) -> None:
    args = engine_args(model=tmp_path, tokenizer=tmp_path / "x", download_dir=tmp_path)
    assert (args.model, args.tokenizer, args.download_dir) == (str(tmp_path), str(tmp_path / "x"), str(tmp_path))
    with pytest.raises(ConfigError, match="^model must be a text, got None.$"):
        engine_args(model=None)


def test_numbers_of_numpy_and_dtypes_of_torch_are_taken() -> None:
    args = engine_args(dtype=torch.bfloat16, max_model_len=np.int64(64), gpu_memory_utilization=np.float32(0.5))
    assert (args.dtype, args.max_model_len, args.gpu_memory_utilization) == ("bfloat16", 64, 0.5)
    assert type(args.max_model_len) is int
    assert engine_args(dtype="half").dtype == "half"


def test_numbers_of_numpy_are_taken_by_every_class_of_options() -> None:
    some = Some(count=np.int64(2), share=np.float32(0.5), flag=np.bool_(True))  # type: ignore[arg-type]
    assert (some, type(some.count), type(some.share), some.flag) == (Some(2, 0.5, flag=True), int, float, True)
    given = {"method": "ngram", "num_speculative_tokens": np.int64(3)}
    assert type(SpeculativeConfig.read(given).num_speculative_tokens) is int
    assert type(EngineArgs(seed=torch.tensor(5)).seed) is int  # type: ignore[arg-type]
