"""The two libraries that a tokenizer can be built on, under one face (`Backend`).

`load_tokenizer` picks one. The `tokenizers` library does everything by itself; SentencePiece knows nothing of special
tokens in a text, so they are found here. Neither changes after loading, and both serve several threads at once.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders

from quire.errors import ModelLoadError
from quire.text.files import TokenizerConfig
from quire.text.streams import StreamFactory

# A protobuf message appended to another is merged into it: normalizer_spec (field 3) {add_dummy_prefix (3): false}.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"

_LONG = 2000  # characters; a shorter text is not worth a batch


class FastBackend:
    """The `tokenizers` library.

    Attributes:
        model_type: "BPE", "Unigram", ...
        decoder_spec: the decoder as tokenizer.json has it; None: tokens are joined by spaces.
        added_tokens: id -> (content, whether it is special).
    """

    def __init__(self, fast: tokenizers.Tokenizer) -> None:
        self._fast = fast
        self.model_type = type(fast.model).__name__
        decoder = fast.decoder
        self.decoder_spec: dict[str, Any] | None = None if decoder is None else json.loads(decoder.__getstate__())
        added = fast.get_added_tokens_decoder()
        self.added_tokens = {index: (token.content, token.special) for index, token in added.items()}
        self.decode, self.id_to_token, self.token_to_id = fast.decode, fast.id_to_token, fast.token_to_id
        self.get_vocab, self.get_vocab_size, self.to_json = fast.get_vocab, fast.get_vocab_size, fast.to_str

    def encode(self, text: str, add_special_tokens: bool, pair: str | None = None) -> list[int]:
        if len(text) < _LONG or pair is not None:
            return self._fast.encode(text, pair, add_special_tokens=add_special_tokens).ids
        # The library lets go of the GIL for batches only.
        return self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


class SentencePieceBackend:
    """SentencePiece's own library, with special tokens found in the text before it sees it; as `FastBackend` else."""

    model_type = "BPE"  # as far as the clean-up of spaces goes: SentencePiece keeps its own

    def __init__(self, processor: Any, later: Any, config: TokenizerConfig) -> None:
        """`later` encodes the text after a special token, `processor` the first."""
        self._processor, self._later, settings = processor, later, config.settings
        self._size: int = processor.get_piece_size()
        self.added_tokens: dict[int, tuple[str, bool]] = {}
        named = (*config.named_tokens.values(), *config.extra_special_tokens)
        special = {token.content for token in named}
        for given, token in (*sorted(config.added_tokens.items()), *((None, token) for token in named)):
            base = self._base_id(token.content)
            if all(token.content != content for content, _ in self.added_tokens.values()):
                index = next(i for i in (base, given, max(self._size - 1, *self.added_tokens, 0) + 1) if i is not None)
                self.added_tokens[index] = (token.content, token.special or token.content in special)
        self._added_ids = {content: i for i, (content, _) in self.added_tokens.items()}
        longest_first = sorted(self._added_ids, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        self._bos = [processor.bos_id()] if processor.bos_id() >= 0 and settings.get("add_bos_token", True) else []
        self._eos = [processor.eos_id()] if processor.eos_id() >= 0 and settings.get("add_eos_token") else []
        decoder = sentencepiece_decoder(has_first_space=settings.get("add_prefix_space") is not False)
        self.decoder_spec: dict[str, Any] | None = json.loads(decoder.__getstate__())
        self._streams = StreamFactory(self, clean_up=False)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        text.encode()  # a lone surrogate raises here
        ids: list[int] = []
        for place, part in enumerate(self._pattern.split(text) if self._pattern else [text]):
            if place % 2:
                ids.append(self._added_ids[part])
            elif part:
                ids.extend((self._later if place else self._processor).encode(part))
        return [*self._bos, *ids, *self._eos] if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        if any(not 0 <= index < 1 << 32 for index in token_ids):
            raise OverflowError  # as the other backend does
        return self._streams.decode(token_ids, skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        if token_id in self.added_tokens:
            return self.added_tokens[token_id][0]
        return self._processor.id_to_piece(token_id) if token_id < self._size else None

    def token_to_id(self, token: str) -> int | None:
        return self._added_ids.get(token, self._base_id(token))

    def get_vocab(self) -> dict[str, int]:
        return {self._processor.id_to_piece(i): i for i in range(self._size)} | self._added_ids

    def get_vocab_size(self, with_added_tokens: bool) -> int:
        return self._size + (sum(i >= self._size for i in self.added_tokens) if with_added_tokens else 0)

    def _base_id(self, token: str) -> int | None:
        index: int = self._processor.piece_to_id(token)
        return index if self._processor.id_to_piece(index) == token else None


Backend = FastBackend | SentencePieceBackend


def sentencepiece_decoder(has_first_space: bool) -> Any:
    """What makes text of SentencePiece's tokens; a text may begin with a space that was added to it."""
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_first_space else steps)


def load_sentencepiece(file: Path, config: TokenizerConfig) -> tuple[SentencePieceBackend, TokenizerConfig]:
    """Load a tokenizer.model; returns the configuration with the model's own control tokens filled in.

    Raises:
        ModelLoadError: the sentencepiece library is missing, or the file is broken.
    """
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise ModelLoadError(
            "tokenizer.model needs the sentencepiece library; install it with pip install sentencepiece, "
            "or add the model's tokenizer.json."
        ) from None
    settings = config.settings
    try:
        proto = file.read_bytes()
        bare = proto + _NO_DUMMY_PREFIX
        first: Any = SentencePieceProcessor(model_proto=bare if settings.get("add_prefix_space") is False else proto)
        later: Any = SentencePieceProcessor(model_proto=proto if settings.get("legacy") else bare)
    except Exception as error:
        message = f"tokenizer.model is no SentencePiece model ({type(error).__name__}); download the file again."
        raise ModelLoadError(message) from None
    ids = {"bos_token": first.bos_id(), "eos_token": first.eos_id(), "unk_token": first.unk_id()}
    own = {name: AddedToken(first.id_to_piece(i), special=True) for name, i in ids.items() if i >= 0}
    config = dataclasses.replace(config, named_tokens=own | config.named_tokens)
    return SentencePieceBackend(first, later, config), config
