"""Every option of `quire bench serve`: a field is an option, its ``help`` the flag's text.

The names are those of `vllm bench serve`. Options that have no meaning together are refused, not ignored.
"""

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quire.config.options import check_options, option
from quire.entrypoints.cli.files import OutputFile, OutputFolder
from quire.errors import ConfigError

_RANDOM, _TRACE, _FILE = ("random",), ("trace",), ("trace", "custom", "sharegpt")


@dataclass(frozen=True)
class LoadArgs:
    """What load to put on which server, and what to tell of it."""

    base_url: str | None = option(None, aliases=("url",))
    """The server, instead of host and port, such as http://localhost:8000/v1."""
    host: str = option("127.0.0.1")
    """The server's host."""
    port: int = option(8000, 1, 65535)
    """The server's port."""
    backend: Literal["openai", "openai-chat", "vllm"] = option("openai", aliases=("endpoint_type",))
    """Completions (vllm, too) or chat."""
    endpoint: str | None = option(None)
    """Path that requests go to; /v1/completions or /v1/chat/completions by default, as the backend says."""
    model: str | None = option(None)
    """Model to ask for; the server's first by default."""
    served_model_name: str | None = option(None)
    """The same, where the other names what it was made of, as vLLM's scripts do for the tokenizer."""
    trust_remote_code: bool = option(False)
    """Of no effect, likewise."""
    tokenizer: str | None = option(None)
    """Of no effect, and taken as vLLM's scripts give it: the server tokenizes, and its counts are shown."""
    tokenizer_mode: str | None = option(None)
    """Of no effect, likewise."""
    skip_tokenizer_init: bool = option(False)
    """Of no effect, likewise."""
    lora_modules: list[str] | None = option(None)
    """Adapters that the server has: each request asks for one, drawn at random, and not for the model."""
    api_key: str | None = option(None)
    """Key; $QUIRE_API_KEY or else $OPENAI_API_KEY by default."""
    ready_check_timeout_sec: float = option(0.0, 0)
    """Seconds to wait for a server that is starting; one that does not answer is told of at once by default."""

    dataset_name: Literal["random", "trace", "custom", "sharegpt"] = option("random")
    """Where prompts come from."""
    dataset_path: str | None = option(None, datasets=_FILE)
    """A trace: CSV with TIMESTAMP,ContextTokens,GeneratedTokens, or Mooncake's JSON lines. Or custom prompts: text, one
    a line, or .jsonl of {"prompt": ..., "max_tokens": ...}. Or ShareGPT's .json of conversations."""
    num_prompts: int | None = option(None, 1)
    """Requests; 1000 random ones, or all of the file, by default."""
    random_input_len: int | None = option(None, 1, datasets=_RANDOM, aliases=("input_len",))
    """Tokens of a random prompt; 1024 by default."""
    random_output_len: int | None = option(None, 1, datasets=("random", "custom"), aliases=("output_len",))
    """Tokens to generate where no dataset says; 128 by default."""
    random_range_ratio: float | None = option(None, 0, 1, datasets=_RANDOM)
    """By which share random lengths differ."""
    random_prefix_len: int | None = option(None, 0, datasets=_RANDOM)
    """Tokens that all random prompts begin with."""
    trace_scale: float | None = option(None, 1e-6, datasets=_TRACE)
    """Multiply a trace's lengths by this."""
    seed: int = option(0, 0)
    """Of prompts and arrivals."""
    ignore_eos: bool | None = option(None)
    """Generate past the end of sequence; so by default, except for custom prompts."""
    temperature: float | None = option(None, 0, 2)
    """Of each request; the model's own by default."""
    num_warmups: int = option(0, 0)
    """Requests before the clock starts."""
    extra_body: dict[str, Any] | None = option(None)
    """Further fields of each request."""

    request_rate: float | None = option(None, 1e-6, math.inf)
    """Requests a second; inf sends all at once. By default inf, or a trace's own times."""
    burstiness: float | None = option(None, 0.01)
    """1 is a Poisson process, less comes in bursts, more is steadier."""
    max_concurrency: int | None = option(None, 1)
    """Hold requests back while so many are under way."""

    goodput: list[str] | None = option(None)
    """Bounds that a good request keeps, such as ttft:500 tpot:50 (or e2el)."""
    metric_percentiles: str = option("90,95,99")
    """Percentiles to tell, with commas between them."""
    output_json: OutputFile | None = option(None)
    """Write the figures to this file."""
    save_result: bool = option(False)
    """The same, to a file whose name tells label, rate, model and time."""
    append_result: bool = option(False)
    """The same as a line of that file, after those that it has."""
    save_detailed: bool = option(False)
    """Have the file tell of each request, too."""
    result_dir: OutputFolder | None = option(None)
    """Folder for --save-result, made where there is none; the current one by default."""
    result_filename: str | None = option(None)
    """Name of its file."""
    label: str | None = option(None)
    """What the figures call the run; the backend by default."""
    metadata: list[str] | None = option(None)
    """Further entries of the figures, KEY=VALUE each."""
    plot: OutputFile | None = option(None)
    """Draw the run as SVG: a timeline of the requests, and distributions."""

    def __post_init__(self) -> None:
        check_options(self)
        for field in dataclasses.fields(self):
            value, datasets = getattr(self, field.name), field.metadata.get("datasets")
            if value is not None and datasets and self.dataset_name not in datasets:
                raise ConfigError(f"{field.name} needs dataset_name {' or '.join(datasets)}.")
        if self.dataset_name != "random" and self.dataset_path is None:
            raise ConfigError(f"dataset_name {self.dataset_name} needs a dataset_path.")
        if self.burstiness not in (None, 1.0) and self.request_rate in (None, math.inf):
            raise ConfigError("burstiness needs a request_rate.")
        if not all("=" in text for text in self.metadata or ()):
            raise ConfigError("metadata has a text without '='; give KEY=VALUE each.")
        _ = self.bounds, self.percentiles  # which check their texts

    @property
    def keeps_trace_times(self) -> bool:
        """Whether requests arrive when the trace says."""
        return self.dataset_name == "trace" and self.request_rate is None

    def result_path(self, facts: Mapping[str, Any]) -> str:
        """Where --save-result writes, named as vLLM does."""
        held = "" if self.max_concurrency is None else f"-concurrency{self.max_concurrency}"
        rate, model = f"{facts['request_rate']}qps", facts["model_id"].split("/")[-1]
        name = self.result_filename or f"{facts['label'] or self.backend}-{rate}{held}-{model}-{facts['date']}.json"
        return os.path.join(self.result_dir or "", name)

    @property
    def percentiles(self) -> list[float]:
        """The percentiles to tell, from 0 to 100."""
        if not all(re.fullmatch(r"\d\d?(\.\d+)?|100", text) for text in self.metric_percentiles.split(",")):
            raise ConfigError("metric_percentiles must be numbers from 0 to 100 with commas between, such as 50,99.")
        return [float(text) for text in self.metric_percentiles.split(",")]

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds of a good request, in milliseconds by metric."""
        bounds: dict[str, float] = {}
        for text in self.goodput or ():
            if (match := re.fullmatch(r"(ttft|tpot|e2el):(\d+(?:\.\d+)?)", text)) is None:
                raise ConfigError("goodput must be ttft, tpot or e2el, a colon and milliseconds, such as ttft:500.")
            bounds[match[1]] = float(match[2])
        return bounds
