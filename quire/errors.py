"""Typed errors for what a user can get wrong, and for what can break under a running engine.

Every room raises these; entry points show them (the HTTP server maps them to statuses). A message names the
field, the value, the limit and the remedy, and never holds a path of the engine, an address or a key.
"""


class QuireError(Exception):
    """Base of every error that Quire raises on purpose."""


class ConfigError(QuireError, ValueError):
    """An engine option is wrong, or options contradict each other."""


class InvalidRequestError(QuireError, ValueError):
    """A request breaks a rule of the API or a limit of this engine.

    Attributes:
        param: the request field at fault (``"prompt"``, ``"top_p"``, ...), or None where no single one is.
        code: a word for programs, where there is one (``"context_length_exceeded"``).
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


def broken(field: str, value: object, rule: str) -> InvalidRequestError:
    """The refusal of a field's value; its `param` is the field's name up to a dot."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return InvalidRequestError(f"{field} must be {rule}; it is {shown}.", field.partition(".")[0])


def require(holds: bool, field: str, value: object, rule: str) -> None:
    """Refuse a field's value, as `broken` words it, unless the rule holds."""
    if not holds:
        raise broken(field, value, rule)


class NotYetSupportedError(QuireError, ValueError):
    """A feature that the API names but this version does not have yet."""


class ModelLoadError(QuireError, ValueError):
    """A model, tokenizer or checkpoint can't be loaded; the message says which file and what to do."""


class EngineDeadError(QuireError, RuntimeError):
    """The engine failed and can serve no further request."""


class EngineStoppedError(EngineDeadError):
    """The engine was shut down, in good order."""


class RequestFailedError(QuireError, RuntimeError):
    """One request failed while the engine computed it; the others go on."""


class OverloadedError(QuireError, RuntimeError):
    """The engine takes no more requests for now.

    Attributes:
        retry_after: seconds after which another try may succeed.
    """

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after
