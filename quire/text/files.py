"""What the files beside tokenizer.json say: special tokens, added tokens, the class that reads it, chat templates.

`load_tokenizer` reads it first. The rules are those of transformers 5 (`AutoTokenizer`), measured by the parity tests:
a few classes rebuild the pipeline of tokenizer.json by code, the others take the file as it is; with a tokenizer.json,
add_bos_token and add_eos_token of tokenizer_config.json count for nothing, as the file's post-processor decides.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from quire.config.config_json import parse_json
from quire.config.families import family_of
from quire.errors import ModelLoadError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Classes whose constructor builds normalizer, pre-tokenizer and decoder, whatever tokenizer.json has; and the special
# tokens that they fill in.
_END = "<|endoftext|>"
REBUILDING_CLASSES: dict[str, dict[str, str]] = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GPT2Tokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END},
    "Qwen2Tokenizer": {"eos_token": _END, "unk_token": _END, "pad_token": _END},
}


@dataclass(frozen=True)
class TokenizerConfig:
    """The settings of one tokenizer directory."""

    tokenizer_class: str  # a key of REBUILDING_CLASSES, or "" where the files are taken as they are
    named_tokens: dict[str, AddedToken]  # "bos_token" etc.
    extra_special_tokens: list[AddedToken]
    added_tokens: dict[int, AddedToken]  # as far as files beside tokenizer.json name them
    chat_template: str | dict[str, str] | None  # one template, or several by name
    settings: dict[str, Any] = field(repr=False)  # the rest of tokenizer_config.json


def read_tokenizer_config(directory: Path) -> TokenizerConfig:
    """Read tokenizer_config.json, special_tokens_map.json, added_tokens.json, chat templates and config.json.

    Each may be missing.

    Raises:
        ModelLoadError: one of them is broken.
    """
    try:
        return _read_tokenizer_config(directory)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ModelLoadError):
            raise
        message = f"tokenizer_config.json, or a file beside it, has an entry of unknown form ({error})"
        raise ModelLoadError(f"{message}; download it again.") from None


def _read_tokenizer_config(directory: Path) -> TokenizerConfig:
    settings = _read_object(directory / "tokenizer_config.json")
    model_config = _read_object(directory / "config.json")
    added: dict[int, AddedToken] = {}
    extra = settings.get("extra_special_tokens") or []
    model_tokens, extra = (extra, []) if isinstance(extra, dict) else ({}, extra)
    extra = extra or settings.get("additional_special_tokens") or []
    if "added_tokens_decoder" in settings:
        added = {int(i): _added_token(token) for i, token in settings["added_tokens_decoder"].items()}
    else:  # only then do the files of old count
        legacy = _read_object(directory / "special_tokens_map.json")
        extra = extra or legacy.get("additional_special_tokens") or []
        settings |= legacy
    values = {k: v for k, v in settings.items() if k.endswith("_token") and isinstance(v, str | dict)} | model_tokens
    tokenizer_class = _tokenizer_class(directory, settings, model_config)
    by_content = {token.content: token for token in added.values()}
    named: dict[str, AddedToken] = {}
    for name, value in (REBUILDING_CLASSES.get(tokenizer_class, {}) | values).items():
        if not (name in settings and settings[name] is None):
            token = _added_token(value, special=True)
            named[name] = by_content.get(token.content, token)
    extras = [_added_token(token, special=True) for token in extra]
    if "added_tokens_decoder" not in settings:
        special = {token.content for token in (*named.values(), *extras)}
        for content, index in _read_object(directory / "added_tokens.json").items():
            added[int(index)] = AddedToken(content, normalized=content not in special, special=content in special)
    return TokenizerConfig(
        tokenizer_class=tokenizer_class,
        named_tokens={name: named[name] for name in (*NAMED_TOKENS, *named) if name in named},
        extra_special_tokens=extras,
        added_tokens=added,
        chat_template=_read_chat_template(directory, settings.get("chat_template")),
        settings=settings,
    )


def _read_object(path: Path) -> dict[str, Any]:
    """What a JSON file says; {} where there is none."""
    return parse_json(path, "the tokenizer") if path.is_file() else {}


def _added_token(value: Any, special: bool = False) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=special)
    flags = {name: value[name] for name in ("single_word", "lstrip", "rstrip", "normalized") if name in value}
    return AddedToken(value["content"], special=special or bool(value.get("special")), **flags)


def _tokenizer_class(directory: Path, settings: dict[str, Any], model_config: dict[str, Any]) -> str:
    """The class whose rules apply: the model type's, or the one that the configuration names."""
    family = family_of(model_config.get("model_type"))
    of_model, overrides = family.tokenizer_class, family.tokenizer_overrides
    declared = settings.get("tokenizer_class") or model_config.get("tokenizer_class")
    if overrides and (declared or of_model):
        return of_model
    chosen = str(declared or of_model).removesuffix("Fast")
    file = directory / "tokenizer.json"
    # Llama 3 and others name Llama 2's class but are byte-level.
    if chosen == "LlamaTokenizer" and file.is_file() and b'"ByteLevel"' in file.read_bytes():
        return ""
    return chosen if chosen in REBUILDING_CLASSES else ""


def _read_chat_template(directory: Path, configured: Any) -> str | dict[str, str] | None:
    """Files of their own come before tokenizer_config.json; several templates go by their names."""
    templates: dict[str, str] = {}
    legacy = directory / "chat_template.json"
    if (directory / "chat_template.jinja").is_file():
        templates["default"] = _read_text(directory / "chat_template.jinja")
    elif configured is None and legacy.is_file():
        configured = _read_object(legacy).get("chat_template")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    if not templates and isinstance(configured, list):
        configured = {entry["name"]: entry["template"] for entry in configured}
    if not templates:
        return configured if isinstance(configured, str | dict) else None
    return templates["default"] if list(templates) == ["default"] else templates


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelLoadError(f"{path.name} of the tokenizer can't be read ({reason}).") from None
