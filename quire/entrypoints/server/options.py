"""Every option of the server: the flags of `quire serve` beside the engine's, which are `EngineArgs`.

A field is an option, its ``help`` the documentation and the flag's text. The names are those of `vllm serve` where it
has such an option. Nothing here opens a file or a socket: `quire.entrypoints.server.launch` does.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from quire.config.options import check_options, option, read_options
from quire.errors import ConfigError


@dataclass(frozen=True)
class StructureOptions:
    """What holds of all structured outputs of a server; see `StructuredOutputsParams`."""

    disable_any_whitespace: bool = option(False)
    """No whitespace between the tokens of JSON."""
    disable_additional_properties: bool = option(False)
    """All objects of a schema have the properties that they name, and no others; else those that name some do, unless
    that could contradict another part of the schema."""
    disable_fallback: bool = option(False)
    """Without effect, as the next one."""
    backend: Literal["auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"] = option("auto")
    """There is one."""

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class ServerArgs:
    """The options of the HTTP server.

    Raises:
        ConfigError: an option is out of its range; the message names the option, the value and the range.
    """

    host: str | None = option(None)
    """Address to listen on; all IPv4 interfaces by default."""
    port: int = option(8000, 0, 65535)
    """TCP port; 0 takes any that is free."""
    uds: str | None = option(None)
    """Path of a Unix socket to listen on, instead of a port."""
    api_key: list[str] | None = option(None, secret=True)
    """Keys, one of which every request has to bring, but for those to /health, /ping, /load, /metrics and /version.
    QUIRE_API_KEY (or vLLM's VLLM_API_KEY) in the environment sets one that the list of processes does not show."""
    served_model_name: list[str] | None = option(None)
    """Names that requests may give for the model, the first one shown in answers; MODEL by default."""
    lora_modules: list[str] | None = option(None)
    """Adapters that requests may name as their model: name=path, or JSON of name and path, each."""
    prompt_adapters: list[str] | None = option(None)
    """Prompt adapters, likewise. Either option takes adapters of either kind."""
    allowed_adapter_dir: str | None = option(None, expands=True)
    """Folder of adapters that clients may load by /v1/load_lora_adapter; none may be without."""
    models_dir: str | None = option(None, expands=True)
    """Folder of models: each sub-folder with a config.json or *.gguf is one, under its name. Loaded at first use."""
    keep_alive: float | None = option(None, -1)
    """Seconds without work after which one of several models is unloaded, 300 by default; 0 at once, -1 never. One
    model alone is loaded at the start and stays, unless this is given."""
    max_loaded_models: int | None = option(None, 1)
    """Most of several models that are loaded at once, 3 by default; the one unused for longest makes room."""
    max_model_wait: float = option(60.0, 0)
    """Seconds for which a request waits until its model finds room; then it gets 503 and Retry-After."""
    root_path: str = option("")
    """Path under which a proxy shows the server, such as /llm."""
    ssl_keyfile: str | None = option(None)
    """Private key of the certificate (PEM)."""
    ssl_certfile: str | None = option(None)
    """Certificate for HTTPS (PEM)."""
    ssl_ca_certs: str | None = option(None)
    """Certificates that sign clients' certificates (PEM)."""
    ssl_ciphers: str | None = option(None)
    """Ciphers for HTTPS up to TLS 1.2, in OpenSSL's form."""
    ssl_cert_reqs: Literal[0, 1, 2] = option(0)
    """Clients' certificates: 0 not asked for, 1 optional, 2 required."""
    allowed_origins: list[str] = option([])
    """Origins whose pages may call the server (CORS), none by default; '*' for all."""
    allowed_methods: list[str] = option(["*"])
    """Methods that such pages may use."""
    allowed_headers: list[str] = option(["*"])
    """Headers that such pages may send."""
    allow_credentials: bool = option(False)
    """Let such pages send cookies and HTTP passwords."""
    log_level: Literal["debug", "info", "warning", "error", "critical"] = option("info")
    """Least severity that is logged; 'debug' adds a line for each request."""
    uvicorn_log_level: Literal["debug", "info", "warning", "error", "critical"] | None = option(None)
    """The same of the web server's own log; errors only by default, as any client could fill it with more."""
    enable_log_requests: bool = option(False)
    """Log what each request asks for, its prompts among it, when it goes to the engine."""
    max_log_len: int | None = option(None, 0)
    """Most characters of a prompt, or numbers of its token ids, that --enable-log-requests shows."""
    disable_log_requests: bool = option(False)
    """No line for each request, at debug level either."""
    disable_uvicorn_access_log: bool = option(False)
    """The same as --disable-log-requests; there is no other such log."""
    disable_access_log_for_endpoints: str | None = option(None)
    """Paths, with commas between them, whose requests get no line, as '/health,/metrics'."""
    disable_fastapi_docs: bool = option(False)
    """Do without /docs and /openapi.json."""
    enable_prompt_tokens_details: bool = option(True)
    """Tell in each usage how many prompt tokens came from the cache."""
    enable_force_include_usage: bool = option(False)
    """End each stream with its usage, asked for or not."""
    enable_request_id_headers: bool = option(False)
    """Answer with an X-Request-Id header: the request's own, or else a new one."""
    middleware: list[str] | None = option(None)
    """Import paths of ASGI middleware classes, or of async functions of a request and what answers it: code of the
    operator's own around every request, the last one outermost."""
    max_num_queued_reqs: int | None = option(None, 1)
    """Most requests that wait for the engine; further ones get 503 and Retry-After. No limit by default."""
    shutdown_timeout: float = option(0.0, 0)
    """Seconds that running requests have to finish after SIGTERM or Ctrl-C; a second signal ends them at once."""
    chat_template: str | None = option(None)
    """Jinja chat template, or a file of one; the model's own by default."""
    chat_template_content_format: Literal["auto", "string", "openai"] = option("auto")
    """How the template gets messages' content: as one 'string', as a list of parts ('openai'), or as it goes through
    content itself ('auto')."""
    default_chat_template_kwargs: dict[str, Any] | None = option(None)
    """Variables for the chat template, which requests may change in their chat_template_kwargs (JSON)."""
    reasoning_effort_map: dict[str, Any] | None = option(None)
    """Efforts that requests give in reasoning_effort -> what the chat template gets for them (JSON)."""
    trust_request_chat_template: bool = option(False)
    """Let requests bring chat templates of their own."""
    tool_call_parser: str = option("auto")
    """Format in which the model calls tools (hermes, llama3_json, ...); 'auto' asks its chat template."""
    enable_auto_tool_choice: bool = option(True)
    """Let the model choose whether it calls a tool, where a request leaves that open."""
    exclude_tools_when_tool_choice_none: bool = option(False)
    """Do not show the model the tools of a request that forbids to call them."""
    structured_outputs_config: dict[str, Any] | None = option(None)
    """Of all structured outputs: disable_any_whitespace, disable_additional_properties (JSON). vLLM's backends are
    taken, and are all the same here."""
    reasoning_parser: str | None = option(None)
    """Format in which the model thinks (deepseek_r1, qwen3, ...), to tell thoughts apart; 'auto' looks for it."""
    response_role: str = option("assistant")
    """Role of the messages that the server writes."""
    return_tokens_as_token_ids: bool = option(False)
    """Show tokens in logprobs as 'token_id:ID', not as text."""
    max_answer_entries: int = option(5_000_000, 1)
    """Most tokens, and alternatives to them, that the answer to a request may hold with ids or logprobs."""
    response_store: str | None = option(None)
    """SQLite file in which the responses of /v1/responses are kept; in memory by default."""
    response_store_max_bytes: int | None = option(None, 0)
    """Most bytes of responses kept, of all API keys together: in memory 256 MiB by default, and what was longest unused
    goes first; in a file 16 GiB, and the oldest go first."""
    response_store_seconds: float = option(30 * 86400.0, 0)
    """Seconds for which a response is kept."""
    max_body_bytes: int = option(16 * 2**20, 1)
    """Largest body of a request, in bytes."""
    engine: Literal["process", "thread"] = option("process")
    """Where the engine computes: its own process, or a thread."""
    step_timeout: float = option(600.0, 1)
    """Seconds after which a step of the engine counts as hung, and the engine dead."""
    timeout_keep_alive: int = option(5, 0)
    """Seconds for which an idle connection is kept."""
    timeout_headers: float = option(30.0, 0.1)
    """Seconds in which a request's line and headers have to arrive."""
    timeout_body: float = option(300.0, 0.1)
    """Seconds in which a request's body has to arrive."""
    h11_max_incomplete_event_size: int = option(65536, 1024)
    """Largest request line and headers, in bytes."""
    h11_max_header_count: int = option(256, 1)
    """Most headers of a request."""

    def __post_init__(self) -> None:
        check_options(self)
        if self.keep_alive is not None and -1 < self.keep_alive < 0:
            raise ConfigError(f"keep_alive must be -1 (never) or at least 0 seconds, got {self.keep_alive:g}.")
        for name, texts in (("api_key", self.api_key), ("served_model_name", self.served_model_name)):
            if texts is not None and not (texts and all(texts) and "".join(texts).isprintable()):
                raise ConfigError(f"{name} must be a list of non-empty, printable texts; leave it out for none.")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl_keyfile and ssl_certfile go together: give both, or neither.")
        if self.ssl_certfile is None and (self.ssl_ca_certs is not None or self.ssl_cert_reqs):
            raise ConfigError("ssl_ca_certs and ssl_cert_reqs need ssl_keyfile and ssl_certfile.")
        if self.enable_log_requests and self.disable_log_requests:
            raise ConfigError("enable_log_requests and disable_log_requests contradict each other; give one of them.")
        if self.max_log_len is not None and not self.enable_log_requests:
            raise ConfigError(f"max_log_len={self.max_log_len} needs enable_log_requests: prompts are not logged else.")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root_path must begin with a slash and not end with one, got {self.root_path!r}.")
        if not self.response_role:
            raise ConfigError("response_role must not be empty.")
        _ = self.structure  # refuses what is not there

    @cached_property
    def structure(self) -> "StructureOptions":
        """What holds of all structured outputs."""
        return read_options(StructureOptions, self.structured_outputs_config or {}, "structured_outputs_config")

    def risks(self) -> list[str]:
        """What these options let strangers do, a sentence each."""
        told: list[str] = []
        if "*" in (self.allowed_origins or ()) and (self.allow_credentials or not self.api_key):
            told.append("allowed_origins '*': any web page that somebody opens can ask, and read the answers.")
        if self.trust_request_chat_template:
            told.append("trust_request_chat_template: whoever may send requests has Jinja programs of theirs run here.")
        return told

    @property
    def logs_requests(self) -> bool:
        """Whether each request gets a line in the log."""
        return self.log_level == "debug" and not (self.disable_log_requests or self.disable_uvicorn_access_log)
