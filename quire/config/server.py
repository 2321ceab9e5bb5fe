"""Every option of the server: the flags of `quire serve` beside the engine's, which are `EngineArgs`.

A field is an option, its ``help`` the documentation and the flag's text. The names are those of `vllm serve`. Nothing
here opens a file or a socket: `quire.entrypoints.server.launch` does.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from quire.errors import ConfigError


def _option(default: Any, help_text: str, *, secret: bool = False) -> Any:
    metadata = {"help": help_text}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


@dataclass(frozen=True)
class ServerArgs:
    """The options of the HTTP server.

    Raises:
        ConfigError: an option is out of its range; the message names the option, the value and the range.
    """

    host: str | None = _option(None, "Address to listen on; all IPv4 interfaces by default.")
    port: int = _option(8000, "TCP port; 0 takes any that is free.")
    uds: str | None = _option(None, "Path of a Unix socket to listen on, instead of a port.")
    api_key: list[str] | None = _option(
        None,
        "Keys, one of which every request but /health and /ping has to bring. QUIRE_API_KEY in the environment sets "
        "one that the list of processes does not show.",
        secret=True,
    )
    served_model_name: list[str] | None = _option(
        None, "Names that requests may give for the model, the first one shown in answers; MODEL by default."
    )
    root_path: str = _option("", "Path under which a proxy shows the server, such as /llm.")
    ssl_keyfile: str | None = _option(None, "Private key of the certificate (PEM).")
    ssl_certfile: str | None = _option(None, "Certificate for HTTPS (PEM).")
    ssl_ca_certs: str | None = _option(None, "Certificates that sign clients' certificates (PEM).")
    ssl_cert_reqs: Literal[0, 1, 2] = _option(0, "Clients' certificates: 0 not asked for, 1 optional, 2 required.")
    allowed_origins: list[str] = _option(
        [], "Origins whose pages may call the server (CORS), none by default; '*' for all."
    )
    allowed_methods: list[str] = _option(["*"], "Methods that such pages may use.")
    allowed_headers: list[str] = _option(["*"], "Headers that such pages may send.")
    allow_credentials: bool = _option(False, "Let such pages send cookies and HTTP passwords.")
    log_level: Literal["debug", "info", "warning", "error", "critical"] = _option(
        "info", "Least severity that is logged; 'debug' adds a line for each request."
    )
    disable_log_requests: bool = _option(False, "No line for each request, at debug level either.")
    disable_uvicorn_access_log: bool = _option(False, "The same as --disable-log-requests; there is no other such log.")
    disable_fastapi_docs: bool = _option(False, "Do without /docs and /openapi.json.")
    enable_request_id_headers: bool = _option(
        False, "Answer with an X-Request-Id header: the request's own, or else a new one."
    )
    max_num_queued_reqs: int | None = _option(
        None, "Most requests that wait for the engine; further ones get 503 and Retry-After. No limit by default."
    )
    shutdown_timeout: float = _option(
        0.0, "Seconds that running requests have to finish after SIGTERM or Ctrl-C; a second signal ends them at once."
    )
    chat_template: str | None = _option(None, "Jinja chat template, or a file of one; the model's own by default.")
    trust_request_chat_template: bool = _option(False, "Let requests bring chat templates of their own.")
    response_role: str = _option("assistant", "Role of the messages that the server writes.")
    return_tokens_as_token_ids: bool = _option(False, "Show tokens in logprobs as 'token_id:ID', not as text.")
    max_body_bytes: int = _option(16 * 2**20, "Largest body of a request, in bytes.")
    engine: Literal["process", "thread"] = _option(
        "process", "Where the engine computes: its own process, or a thread."
    )
    step_timeout: float = _option(
        600.0, "Seconds after which a step of the engine counts as hung, and the engine dead."
    )
    timeout_keep_alive: int = _option(5, "Seconds for which an idle connection is kept.")
    timeout_headers: float = _option(30.0, "Seconds in which a request's line and headers have to arrive.")
    timeout_body: float = _option(300.0, "Seconds in which a request's body has to arrive.")
    h11_max_incomplete_event_size: int = _option(65536, "Largest request line and headers, in bytes.")
    h11_max_header_count: int = _option(256, "Most headers of a request.")

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            _check_number(name, getattr(self, name), least, most)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                shown = ", ".join(repr(c) for c in choices)
                raise ConfigError(f"{name} must be one of {shown}, got {getattr(self, name)!r}.")
        for name in ("api_key", "served_model_name"):
            if (values := getattr(self, name)) is not None and not (values and all(values)):
                raise ConfigError(f"{name} must be a list of non-empty texts; leave it out for none.")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl_keyfile and ssl_certfile go together: give both, or neither.")
        if self.ssl_certfile is None and (self.ssl_ca_certs is not None or self.ssl_cert_reqs):
            raise ConfigError("ssl_ca_certs and ssl_cert_reqs need ssl_keyfile and ssl_certfile.")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root_path must begin with a slash and not end with one, got {self.root_path!r}.")
        if not self.response_role:
            raise ConfigError("response_role must not be empty.")

    @property
    def logs_requests(self) -> bool:
        """Whether each request gets a line in the log."""
        return self.log_level == "debug" and not (self.disable_log_requests or self.disable_uvicorn_access_log)


def _check_number(name: str, value: Any, least: float, most: float) -> None:
    if value is None and name == "max_num_queued_reqs":
        return
    kind = int if isinstance(least, int) else float
    if isinstance(value, bool) or not isinstance(value, int | kind) or not least <= value <= most:
        what = "an integer" if kind is int else "a number"
        limit = f"at least {least:g}" if most == _ANY else f"from {least:g} to {most:g}"
        raise ConfigError(f"{name} must be {what}, {limit}, got {value!r}.")


_ANY = 2**62
# An integer as the least value stands for whole numbers only.
_RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "max_num_queued_reqs": (1, _ANY),
    "shutdown_timeout": (0.0, _ANY),
    "max_body_bytes": (1, _ANY),
    "step_timeout": (1.0, _ANY),
    "timeout_keep_alive": (0, _ANY),
    "timeout_headers": (0.1, _ANY),
    "timeout_body": (0.1, _ANY),
    "h11_max_incomplete_event_size": (1024, _ANY),
    "h11_max_header_count": (1, _ANY),
}
_CHOICES: dict[str, tuple[Any, ...]] = {
    "log_level": ("debug", "info", "warning", "error", "critical"),
    "engine": ("process", "thread"),
    "ssl_cert_reqs": (0, 1, 2),
}
