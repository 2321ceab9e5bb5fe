"""The tokenizer that a GGUF file holds, as the `tokenizers` library has it.

`load_tokenizer` asks for it where a model is a .gguf file. Byte-level BPE ("gpt2") comes with its merges and the name
of its pre-tokenizer; SentencePiece's BPE ("llama") with scores, from which its merges follow. What llama.cpp knows by
such a name, and what it does where a file is silent, is written down here.
"""

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from quire.config.gguf import GGUFFile
from quire.errors import ModelLoadError, NotYetSupportedError, QuireError
from quire.text.backend import sentencepiece_decoder
from quire.text.files import TokenizerConfig

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # of tokenizer.ggml.token_type
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?%s*%s+|[^\r\n\p{L}\p{N}]?%s+%s*" % (_LETTERS * 2)
    + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Name of a pre-tokenizer -> how text is split: by an expression, or as GPT-2 does, with digits apart ("digits") or not.
_SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "glm4"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2_SPLIT),
    **dict.fromkeys(("gpt-2", "default", "phi-2", "mpt", "olmo", "jina-es", "jina-de", "roberta-bpe"), "gpt-2"),
    "exaone4": "gpt-2",
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), "digits"),
    "tekken": _TEKKEN,
}
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a word that is a token is not put together from merges
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


class _Vocabulary:
    """What the metadata has under tokenizer.ggml."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.tokens: list[str] = self.list_of("tokens", str)
        if not self.tokens:
            raise self.error("has no tokenizer (tokenizer.ggml.tokens): name a directory with one by tokenizer=")
        self.kinds: list[int] = self.list_of("token_type", int) or [1] * len(self.tokens)
        self.ids = {
            token: index
            for index, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=False))
            if not (kind == _UNUSED and token.startswith("[PAD"))  # rows of the embedding that no token has
        }

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"tokenizer.ggml.{key}", default)

    def list_of(self, key: str, kind: type) -> list[Any]:
        values = self.get(key, [])
        if not isinstance(values, list) or any(not isinstance(value, kind) for value in values[:1]):
            raise self.error(f"has a tokenizer.ggml.{key} that is no list of {kind.__name__}")
        count = len(values) if key in ("tokens", "merges") else len(self.tokens)
        if values and len(values) != count:
            raise self.error(f"has {len(values)} entries of tokenizer.ggml.{key} for {count} tokens")
        return values

    def error(self, complaint: str) -> ModelLoadError:
        return ModelLoadError(f"{self.file.path.name} {complaint}.")

    def named(self) -> dict[str, str]:
        """The special tokens that have a name."""
        found = {name: index for name, key in _NAMED.items() if (index := self.get(f"{key}_token_id")) is not None}
        for name, index in found.items():
            if type(index) is not int or not 0 <= index < len(self.tokens):
                raise self.error(f"has the {name} {index!r}, where there are {len(self.tokens)} tokens")
        return {name: self.tokens[index] for name, index in found.items()}


def read_gguf_tokenizer(file: GGUFFile) -> tuple[tokenizers.Tokenizer, TokenizerConfig]:
    """The tokenizer, to which its added tokens are still to be added, and their list.

    Raises:
        ModelLoadError: there is none, or its parts don't fit. NotYetSupportedError: it is of another kind.
    """
    vocabulary = _Vocabulary(file)
    kind = vocabulary.get("model")
    if kind not in ("gpt2", "llama"):
        raise NotYetSupportedError(
            f"{file.path.name} has a tokenizer of kind {kind!r}; 'gpt2' and 'llama' are supported: name a directory "
            "with the model's tokenizer.json by tokenizer=."
        )
    named = vocabulary.named()
    try:
        fast = _byte_level(vocabulary) if kind == "gpt2" else _sentencepiece(vocabulary, named.get("unk_token"))
    except QuireError:
        raise
    except Exception as error:  # what the tokenizers library raises is of no narrower class
        raise vocabulary.error(f"has a tokenizer whose parts don't fit ({error})") from error
    begins = kind == "llama" or vocabulary.get("pre") in _WHOLE_WORDS  # where the file is silent
    special = {
        index: AddedToken(token, special=kind == _CONTROL or token in named.values(), normalized=False)
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN) and token
    }
    config = TokenizerConfig(
        tokenizer_class="",
        named_tokens={
            name: special.get(vocabulary.ids[token], AddedToken(token, special=True, normalized=False))
            for name, token in named.items()
            if token in vocabulary.ids
        },
        extra_special_tokens=[],
        added_tokens=special,
        chat_template=_chat_template(file),
        settings={
            "add_bos_token": vocabulary.get("add_bos_token", begins),
            "add_eos_token": vocabulary.get("add_eos_token"),
        },
    )
    return fast, config


def _chat_template(file: GGUFFile) -> str | dict[str, str] | None:
    """The template, or several by name."""
    prefix = "tokenizer.chat_template"
    named = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(f"{prefix}.")}
    default = file.metadata.get(prefix)
    return {"default": default} | {name[1:]: text for name, text in named.items()} if named and default else default


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    pre = vocabulary.get("pre", "default")
    if pre not in _SPLITS:
        raise NotYetSupportedError(
            f"{vocabulary.file.path.name} splits text as {pre!r} (tokenizer.ggml.pre), which is not supported; "
            f"supported are {', '.join(_SPLITS)}. Name a directory with the model's tokenizer.json by tokenizer=."
        )
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.list_of("merges", str)]
    options: Any = {"vocab": vocabulary.ids, "merges": merges, "ignore_merges": pre in _WHOLE_WORDS}
    fast = tokenizers.Tokenizer(models.BPE(**options))
    take_bytes(fast, _SPLITS[pre])
    return fast


def take_bytes(fast: tokenizers.Tokenizer, split: str, add_prefix_space: bool = False) -> None:
    """Have a tokenizer split text as an entry of _SPLITS says, and look up the bytes of each part."""
    by_bytes: Any = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=split in ("gpt-2", "digits"))
    if split == "digits":
        by_bytes = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_bytes])
    elif split != "gpt-2":
        by_bytes = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), behavior="isolated"), by_bytes])
    normalizer: Any = normalizers.NFC() if split == QWEN2_SPLIT else None
    decoder: Any = decoders.ByteLevel()
    fast.normalizer, fast.pre_tokenizer, fast.decoder = normalizer, by_bytes, decoder


def _sentencepiece(vocabulary: _Vocabulary, unknown: str | None) -> tokenizers.Tokenizer:
    scores = vocabulary.list_of("scores", float)
    if not scores:
        raise vocabulary.error("has a tokenizer of kind 'llama' without scores")
    no_parts = (_UNKNOWN, _CONTROL, _BYTE)
    ids = {token: index for token, index in vocabulary.ids.items() if vocabulary.kinds[index] not in no_parts}
    merges: list[tuple[float, int, int, int, int, str, str]] = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-scores[index], -cut, cut - len(token), left, right, token[:cut], token[cut:]))
    options: Any = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    model = models.BPE(vocab=vocabulary.ids, merges=[merge[-2:] for merge in sorted(merges)], **options)
    fast = tokenizers.Tokenizer(model)
    has_first_space = bool(vocabulary.get("add_space_prefix", True))
    steps = [*([normalizers.Prepend("▁")] if has_first_space else ()), normalizers.Replace(" ", "▁")]
    fast.normalizer = normalizers.Sequence(steps)  # type: ignore[assignment]
    fast.decoder = sentencepiece_decoder(has_first_space)
    return fast
