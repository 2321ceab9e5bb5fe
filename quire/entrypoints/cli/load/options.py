"""Every option of `quire bench serve`: a field is an option, its ``help`` the flag's text.

The names are those of `vllm bench serve`. Options that have no meaning together are refused, not ignored.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from quire.errors import ConfigError


def _option(
    default: Any, help_text: str, *, least: float = -1e9, most: float = 1e9, only: tuple[str, ...] = ()
) -> Any:
    """An option, the range of its number, and the datasets that it is for."""
    return dataclasses.field(
        default=default, metadata={"help": help_text, "least": least, "most": most, "only": only}
    )


@dataclass(frozen=True)
class LoadArgs:
    """What load to put on which server, and what to tell of it.

    Raises:
        ConfigError: an option is out of its range, or contradicts another.
    """

    base_url: str | None = _option(None, "The server, instead of host and port; unix:/path for a Unix socket.")
    host: str = _option("127.0.0.1", "The server's host.")
    port: int = _option(8000, "The server's port.", least=1, most=65535)
    backend: Literal["openai", "openai-chat", "vllm"] = _option(
        "openai", "Completions (openai, or vllm, which is the same) or chat completions."
    )
    model: str | None = _option(None, "Model to ask for; the server's first by default.")
    api_key: str | None = _option(None, "Key; $QUIRE_API_KEY or else $OPENAI_API_KEY by default.")

    dataset_name: Literal["random", "trace", "custom"] = _option(
        "random", "Random prompts, a recorded trace, or prompts of a file."
    )
    dataset_path: str | None = _option(
        None,
        "Of a trace: CSV with TIMESTAMP,ContextTokens,GeneratedTokens, or Mooncake's JSON lines. Of custom prompts: "
        'text, one a line, or .jsonl of {"prompt": ..., "max_tokens": ...}.',
        only=("trace", "custom"),
    )
    num_prompts: int | None = _option(None, "Requests; 1000 random ones, or all of the file, by default.", least=1)
    random_input_len: int | None = _option(
        None, "Tokens of a random prompt; 1024 by default.", least=1, only=("random",)
    )
    random_output_len: int | None = _option(
        None, "Tokens to generate where no dataset says; 128 by default.", least=1, only=("random", "custom")
    )
    random_range_ratio: float | None = _option(
        None, "Random lengths lie within this share of those; 0 by default.", least=0, most=1, only=("random",)
    )
    random_prefix_len: int | None = _option(
        None, "Tokens with which all random prompts begin, beside their own.", least=0, only=("random",)
    )
    trace_scale: float | None = _option(
        None, "Multiply a trace's lengths, to suit a small model.", least=1e-6, only=("trace",)
    )
    trace_speedup: float | None = _option(None, "Play a trace this many times as fast.", least=1e-6, only=("trace",))
    ignore_eos: bool | None = _option(
        None, "Generate past the end-of-sequence token; so by default, except for custom prompts."
    )
    seed: int = _option(0, "Of prompts and arrivals.", least=0)
    extra_body: dict[str, Any] | None = _option(None, "Further fields of each request, such as temperature.")

    request_rate: float | None = _option(
        None,
        "Requests a second; inf sends all at once. By default inf, or a trace's own times.",
        least=1e-6,
        most=math.inf,
    )
    burstiness: float | None = _option(
        None,
        "Shape of the gaps: 1 (the default) is a Poisson process, less comes in bursts, more is steadier.",
        least=0.01,
    )
    max_concurrency: int | None = _option(None, "Hold requests back while so many are under way.", least=1)
    num_warmups: int = _option(0, "Requests before the clock starts.", least=0)

    goodput: list[str] | None = _option(
        None, "Bounds in milliseconds that a good request keeps, of ttft, tpot and e2el, such as ttft:500 tpot:50."
    )
    output_json: str | None = _option(None, "Write the figures to this file.")
    save_detailed: bool = _option(False, "Write each request's times, too.")
    plot: str | None = _option(None, "Draw the run as SVG: a timeline of the requests, and distributions.")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, least, most = getattr(self, field.name), field.metadata["least"], field.metadata["most"]
            if isinstance(value, int | float) and not least <= value <= most:
                raise ConfigError(f"{field.name} must be from {least:g} to {most:g}, got {value}.")
            datasets = field.metadata["only"]
            if value is not None and datasets and self.dataset_name not in datasets:
                raise ConfigError(f"{field.name} needs dataset_name {' or '.join(datasets)}.")
        if self.dataset_name != "random" and self.dataset_path is None:
            raise ConfigError(f"dataset_name {self.dataset_name} needs a dataset_path.")
        if self.burstiness is not None and math.isinf(self.rate):
            raise ConfigError("burstiness needs a request_rate.")
        if self.request_rate is not None and self.trace_speedup is not None:
            raise ConfigError("request_rate replaces a trace's own times: leave out trace_speedup.")
        if self.save_detailed and self.output_json is None:
            raise ConfigError("save_detailed needs output_json.")
        _ = self.bounds  # which checks its texts

    @property
    def rate(self) -> float:
        """Requests a second."""
        return math.inf if self.request_rate is None else self.request_rate

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds of a good request, in milliseconds by metric."""
        bounds: dict[str, float] = {}
        for text in self.goodput or ():
            name, _, limit = text.partition(":")
            try:
                bounds[name] = float(limit)
            except ValueError:
                bounds[name] = math.nan
            if name not in ("ttft", "tpot", "e2el") or not bounds[name] > 0:
                raise ConfigError("goodput must be ttft, tpot or e2el, a colon and milliseconds, such as ttft:500.")
        return bounds
