"""Text to token ids and back, as transformers' AutoTokenizer would, without transformers.

`load_tokenizer` makes one per model from tokenizer.json, vocab.json with merges.txt, or SentencePiece's
tokenizer.model. Input and output processors share it between threads: nothing changes after loading. It knows nothing
of requests.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, overload

import tokenizers
from tokenizers import models, pre_tokenizers, processors

from quire.config.gguf import read_gguf
from quire.errors import ConfigError, InvalidRequestError, ModelLoadError, NotYetSupportedError, require
from quire.text.backend import Backend, FastBackend, load_sentencepiece, sentencepiece_decoder
from quire.text.conversation import Conversation
from quire.text.files import NAMED_TOKENS, TokenizerConfig, read_tokenizer_config
from quire.text.gguf import QWEN2_SPLIT, read_gguf_tokenizer, take_bytes
from quire.text.renderer import Renderer
from quire.text.streams import StreamFactory, clean_up_spaces
from quire.utils.logs import logger
from quire.utils.values import number, token_ids

_TRUNCATIONS = (None, False, True, "longest_first", "only_first", "only_second", "do_not_truncate")
_OF_CALLS = {"padding", "truncation", "max_length", "return_tensors"}
_OF_CONVERSATIONS = {"documents", "chat_template", "add_generation_prompt", "continue_final_message"}


class Encoding(dict[str, Any]):
    """What a tokenizer that is called gives: lists by name, which are attributes, too."""

    input_ids: Any  # list[int], or one for each text
    attention_mask: Any  # likewise, of ones: nothing is padded

    def __init__(self, **lists: Any) -> None:
        super().__init__(lists)
        self.__dict__ = self


class Tokenizer:
    """A model's tokenizer, with what transformers' is asked for most; for the rest it asks transformers', if installed.

    Attributes:
        name_or_path: where it was loaded from, as given.
        is_fast: built on the `tokenizers` library (else SentencePiece).
        chat_template: the model's template, several by name, or None.
        special_tokens_map: "bos_token" etc. -> token, as far as set.
        bos_token, eos_token, and so on: the named special tokens; None where the model has none.
        bos_token_id, eos_token_id, and so on: their ids.
        all_special_tokens: the named special tokens and the extra ones; all_special_ids: their ids.
        truncation_side: which of a text's tokens go where it is cut, by default: "right" or "left".
        vocab_size: tokens of the base vocabulary; `len(tokenizer)` counts the added ones too.
        model_max_length: the tokenizer's own idea of the context length, if it has one.
        bytes_of, new_stream: `StreamFactory`'s, of streams of the text that follows a prompt.
    """

    def __init__(self, backend: Backend, config: TokenizerConfig, name_or_path: str) -> None:
        self._backend, self.name_or_path = backend, name_or_path
        self.is_fast = isinstance(backend, FastBackend)
        self.chat_template = config.chat_template
        self.special_tokens_map = {name: token.content for name, token in config.named_tokens.items()}
        extra = (token.content for token in config.extra_special_tokens)
        self.all_special_tokens = list(dict.fromkeys((*self.special_tokens_map.values(), *extra)))
        self.all_special_ids = [i for i in self.convert_tokens_to_ids(self.all_special_tokens) if i is not None]
        self.vocab_size = backend.get_vocab_size(with_added_tokens=False)
        self.model_max_length: int | None = config.settings.get("model_max_length")
        # Made for WordPiece, and harmful to BPE, which keeps its own spaces.
        self._clean_up = bool(config.settings.get("clean_up_tokenization_spaces")) and backend.model_type != "BPE"
        self._streams = StreamFactory(backend, self._clean_up)
        self.bytes_of, self.new_stream = self._streams.bytes_of, self._streams.new
        self._renderer = Renderer()
        self._texts: dict[bool, dict[int, str]] = {True: {}, False: {}}  # of single tokens; True: no special ones
        self.truncation_side: str = config.settings.get("truncation_side", "right")
        self._theirs: Any = None  # transformers' tokenizer, once it is asked
        self._own = frozenset(vars(self)) - {"chat_template", "truncation_side"} | {"_own"}  # what nobody sets

    def __getattr__(self, name: str) -> Any:
        """A named special token, or its id; or what transformers' tokenizer has. Called for what is not here only."""
        named = name.removesuffix("_id")
        if named in NAMED_TOKENS:
            token = vars(self).get(named, self.special_tokens_map.get(named))
            return token if token is None or name == named else self.convert_tokens_to_ids(token)
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        try:
            return getattr(self._transformers(name), name)
        except NotYetSupportedError as error:
            raise AttributeError(str(error), name=name, obj=self) from None

    def _transformers(self, wanted: str) -> Any:
        """transformers' tokenizer of the same files, with what has been set on this one.

        Raises:
            NotYetSupportedError: it is not installed, or can't read them.
        """
        if self._theirs is None:
            path = Path(self.name_or_path)
            place, options = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
            try:
                from transformers import AutoTokenizer

                self._theirs = AutoTokenizer.from_pretrained(place, trust_remote_code=False, **options)
            except Exception as error:
                message = f"{wanted} is left to transformers' tokenizer, which can't be had ({error}): pip install it."
                raise NotYetSupportedError(message) from None
        for name in vars(self).keys() - self._own:
            setattr(self._theirs, name, getattr(self, name))
        return self._theirs

    def __call__(
        self,
        text: str | Sequence[str],
        text_pair: Any = None,
        *,
        add_special_tokens: bool = True,
        truncation: bool | str = False,
        max_length: int | None = None,
        truncation_side: str | None = None,
        **others: Any,
    ) -> Encoding:
        """A text, or each of several, as token ids (`input_ids`), with an `attention_mask` of ones.

        Args:
            text_pair, others: what transformers' has besides; it answers then, with an encoding of its own.
            truncation: true, or "longest_first": keep at most `max_length` tokens, with the special ones around the
                text, which stay.
            max_length: model_max_length by default.
            truncation_side: the tokenizer's own by default.

        Raises:
            InvalidRequestError: as `encode`.
            NotYetSupportedError: there is no transformers to answer.
        """
        others["text_pair"], side = text_pair, truncation_side or self.truncation_side
        require(truncation in _TRUNCATIONS, "truncation", truncation, f"one of {_TRUNCATIONS}")
        require(side in ("left", "right"), "truncation_side", side, "'left' or 'right'")
        require(max_length is None or (number(max_length, int) or 0) > 0, "max_length", max_length, "an integer over 0")
        if asked := [name for name, value in others.items() if value not in (None, False, "do_not_pad")]:
            options = {"add_special_tokens": add_special_tokens, "truncation": truncation, "max_length": max_length}
            theirs = self._transformers(asked[0])
            theirs.truncation_side = side
            return theirs(text, **others, **options)
        texts = text if isinstance(text, Iterable) and not isinstance(text, str) else [text]
        keep = (max_length or self.model_max_length) if truncation not in (None, False, "do_not_truncate") else None
        many = [self._encode_some(one, add_special_tokens, keep, side) for one in texts]
        lists = {"input_ids": many, "attention_mask": [[1] * len(ids) for ids in many]}
        return Encoding(**({name: each[0] for name, each in lists.items()} if isinstance(text, str) else lists))

    def _encode_some(self, text: str, add_special_tokens: bool, keep: int | None, truncated: str) -> list[int]:
        ids = self.encode(text, add_special_tokens)
        if keep is None or len(ids) <= keep:
            return ids
        own = self._backend.encode(text, False)
        begin = next(place for place in range(len(ids)) if ids[place : place + len(own)] == own)
        room = max(0, keep - len(ids) + len(own))
        kept = own[:room] if truncated == "right" else own[len(own) - room :]
        return ids[:begin] + kept + ids[begin + len(own) :]

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> list[int]:
        """Token ids of a text; special tokens written in it become their ids. Options are those of a call.

        Raises:
            InvalidRequestError: the text holds a lone surrogate, so is no Unicode text.
        """
        if options:
            return self(text, add_special_tokens=add_special_tokens, **options).input_ids
        try:
            return self._backend.encode(text, add_special_tokens)
        except (TypeError, UnicodeEncodeError):
            require(isinstance(add_special_tokens, bool), "add_special_tokens", add_special_tokens, "True or False")
            if not isinstance(text, str):
                raise InvalidRequestError(f"the text to encode is a {type(text).__name__}, not a string.") from None
            message = "the text holds a lone surrogate (U+D800 to U+DFFF), which no text can; drop it."
            raise InvalidRequestError(message, "prompt") from None

    def encode_pair(self, text: str, pair: str) -> list[int]:
        """Token ids of two texts with the special tokens between and around them. Raises as `encode` does."""
        with suppress(TypeError, UnicodeEncodeError):  # `encode` says which text it is, and why
            if isinstance(self._backend, FastBackend):
                return self._backend.encode(text, True, pair)
        return self.encode(text) + self.encode(pair)

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = False) -> str:
        """Text of token ids, as transformers' with its special tokens unless told otherwise.

        Ids that the vocabulary lacks (a padded embedding's) have no text.

        Raises:
            InvalidRequestError: an id is negative, over 32 bits, or no integer.
        """
        try:
            ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
            text = self._backend.decode(ids, skip_special_tokens)
        except (OverflowError, TypeError):
            raise InvalidRequestError("token ids to decode must be integers from 0 to 2**32 - 1.") from None
        return clean_up_spaces(text) if self._clean_up else text

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        """`decode` of each."""
        return [self.decode(token_ids, skip_special_tokens) for token_ids in sequences]

    def token_text(self, token_id: int, skip_special_tokens: bool = False) -> str:
        """Text of one token by itself; kept, as log-probabilities name the same tokens again."""
        texts = self._texts[skip_special_tokens]
        if (text := texts.get(token_id)) is None:
            text = texts[token_id] = self.decode([token_id], skip_special_tokens)
        return text

    @overload
    def convert_ids_to_tokens(self, ids: int, skip_special_tokens: bool = False) -> str | None: ...
    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int], skip_special_tokens: bool = False) -> list[str | None]: ...
    def convert_ids_to_tokens(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> Any:
        """The vocabulary's own spelling of ids; None for an id that it lacks."""
        if isinstance(ids, int):
            return self._backend.id_to_token(ids) if ids >= 0 else None
        skipped = self.all_special_ids if skip_special_tokens else ()
        return [self.convert_ids_to_tokens(i) for i in token_ids("ids", ids) if i not in skipped]

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | None | list[int | None]:
        """Ids of tokens in the vocabulary's spelling; the unknown token's id, or None, for others."""
        if isinstance(tokens, str):
            index = self._backend.token_to_id(tokens)
            unknown = self.special_tokens_map.get("unk_token")
            return self._backend.token_to_id(unknown) if index is None and unknown is not None else index
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def apply_chat_template(
        self, conversation: Any, tools: Any = None, *, tokenize: bool = True, return_dict: bool = False, **options: Any
    ) -> Any:
        """A conversation, or each of several, as the model's prompt: token ids, or text if not `tokenize`.

        Args:
            return_dict: give all that a call gives, and not its `input_ids` alone.
            options: fields of `Conversation`; `padding`, `truncation`, `max_length` and `return_tensors`, as of a call;
                further names go to the template.

        Raises:
            InvalidRequestError, RequestFailedError: see `render`. NotYetSupportedError: see a call.
        """
        call = {name: options.pop(name) for name in _OF_CALLS & options.keys()}
        fields = {"add_generation_prompt": False, "tools": tools}
        fields |= {name: options.pop(name) for name in _OF_CONVERSATIONS & options.keys()}
        several = isinstance(conversation, Sequence) and isinstance(next(iter(conversation), None), list | tuple)
        each = conversation if several else [conversation]
        texts = [self.render(Conversation(messages=one, chat_template_kwargs=options, **fields)) for one in each]
        text = texts if several else texts[0]
        encoding = self(text, add_special_tokens=False, **call) if tokenize else None
        return text if encoding is None else encoding if return_dict else encoding.input_ids

    def render(self, conversation: Conversation) -> str:
        """A conversation as the model's prompt. A template writes its own special tokens: encode it without more.

        The first one starts the process that templates run in, which stays as long as this tokenizer.

        Raises:
            InvalidRequestError: bad messages, no template, or the template's own complaint, time or memory.
            RequestFailedError: the process can't be started, or fails by itself.
        """
        return self._renderer.render(conversation.job(self))

    def grammar_table(self) -> tuple[str, dict[str, int]]:
        """What grammars need: tokenizer.json as text, and the ids of the tokens that stand for no text, by name.

        Raises:
            InvalidRequestError: this tokenizer has no such file.
        """
        if not isinstance(self._backend, FastBackend):
            message = "structured outputs need a tokenizer.json, and this model has none; add one, or leave them out."
            raise InvalidRequestError(message, "structured_outputs")
        special = {content: i for i, (content, is_special) in self._backend.added_tokens.items() if is_special}
        return self._backend.to_json(), special

    def get_vocab(self) -> dict[str, int]:
        """token -> id, with the added tokens."""
        return self._backend.get_vocab()

    def __len__(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True


def load_tokenizer(path: str | Path, mode: str = "auto") -> Tokenizer:
    """Load the tokenizer of a model directory, or the one in a .gguf file.

    Args:
        mode: "auto" takes tokenizer.json, else vocab.json with merges.txt, else tokenizer.model, and "hf" is the same;
            "slow" takes tokenizer.model, through the sentencepiece library; "mistral" is for Mistral's own formats.

    Raises:
        ModelLoadError: a file is missing or broken, or a library is.
        NotYetSupportedError: mode "mistral" without a tokenizer.json.
        ConfigError: an unknown mode.
    """
    directory = Path(path)
    if mode not in ("auto", "hf", "slow", "mistral"):
        raise ConfigError(f"tokenizer_mode={mode!r} is unknown; use 'auto', 'slow' or 'mistral'.")
    if directory.is_file():
        fast, config = read_gguf_tokenizer(read_gguf(directory))
        return Tokenizer(_finish(fast, config, adds_ends=True), config, str(path))
    has_json = (directory / "tokenizer.json").is_file()
    if mode == "mistral":
        if not has_json:
            raise NotYetSupportedError(
                "tokenizer_mode='mistral' can't read tekken.json or tokenizer.model.v* files yet; add the model's "
                "tokenizer.json, and use tokenizer_mode='auto'."
            )
        logger.warning("tokenizer_mode='mistral' reads tokenizer.json for now, as 'auto' does.")
    config = read_tokenizer_config(directory)
    backend: Backend
    if has_json and mode != "slow":
        backend = _load_tokenizer_json(directory / "tokenizer.json", config)
    elif (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file() and mode != "slow":
        backend = _load_vocab_and_merges(directory, config)
    elif (directory / "tokenizer.model").is_file():
        backend, config = load_sentencepiece(directory / "tokenizer.model", config)
    elif not directory.is_dir():
        raise ModelLoadError(f"there is no tokenizer directory {directory.name!r}; give a model directory.")
    else:
        wanted = "tokenizer.model" if mode == "slow" else "tokenizer.json, vocab.json with merges.txt, tokenizer.model"
        raise ModelLoadError(
            f"the model directory has no tokenizer file ({wanted}); add one, name another directory by tokenizer=, or "
            "set skip_tokenizer_init=True and pass token ids."
        )
    return Tokenizer(backend, config, str(path))


def _load_tokenizer_json(file: Path, config: TokenizerConfig) -> FastBackend:
    try:
        fast = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ModelLoadError(f"tokenizer.json can't be read ({error}); download the file again.") from None
    _rebuild(fast, config)
    return _finish(fast, config)


def _load_vocab_and_merges(directory: Path, config: TokenizerConfig) -> FastBackend:
    """GPT-2's two files, as old OPT and GPT-2 checkpoints have them."""
    try:
        model = models.BPE.from_file(str(directory / "vocab.json"), str(directory / "merges.txt"))
    except Exception as error:
        raise ModelLoadError(f"vocab.json or merges.txt can't be read ({error}); download them again.") from None
    fast = tokenizers.Tokenizer(model)
    _rebuild(fast, config, config.tokenizer_class or "GPT2Tokenizer")
    return _finish(fast, config, adds_ends=True)


def _finish(fast: tokenizers.Tokenizer, config: TokenizerConfig, adds_ends: bool = False) -> FastBackend:
    """Add the tokens that the configuration names, and let nothing pad or cut.

    `adds_ends`: let the tokens that it names for it begin and end every text.
    """
    fast.no_padding()
    fast.no_truncation()
    fast.encode_special_tokens = bool(config.settings.get("split_special_tokens"))
    present = fast.get_added_tokens_decoder()
    unchanged = {token.content: token.__getstate__() for token in present.values()}
    named = {token.content for token in config.named_tokens.values()}
    tokens = [token for _, token in sorted((present | config.added_tokens).items())]
    contents = {token.content for token in tokens}
    tokens += [t for t in (*config.named_tokens.values(), *config.extra_special_tokens) if t.content not in contents]
    for token in tokens:
        token.special = token.special or token.content in named
    # A token that is there already takes on the flags given last.
    fast.add_tokens([token for token in tokens if unchanged.get(token.content) != token.__getstate__()])
    ends = config.named_tokens if adds_ends else {}
    bos = [ends["bos_token"].content] if config.settings.get("add_bos_token") and "bos_token" in ends else []
    eos = [ends["eos_token"].content] if config.settings.get("add_eos_token") and "eos_token" in ends else []
    if bos or eos:
        fast.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=[*bos, "$A", *eos], special_tokens=[(t, fast.token_to_id(t)) for t in {*bos, *eos}]
        )
    return FastBackend(fast)


def _rebuild(fast: tokenizers.Tokenizer, config: TokenizerConfig, name: str | None = None) -> None:
    """Give the tokenizer the pipeline of its class, as the constructors of transformers 5 do."""
    name = name or config.tokenizer_class
    model, settings = fast.model, config.settings
    if not name or not isinstance(model, models.BPE):
        return
    add_prefix_space = settings.get("add_prefix_space")
    is_llama = name == "LlamaTokenizer"
    model.unk_token, model.byte_fallback, model.fuse_unk, model.ignore_merges = None, is_llama, is_llama, False  # type: ignore[assignment]
    if not is_llama:
        take_bytes(fast, QWEN2_SPLIT if name == "Qwen2Tokenizer" else "gpt-2", bool(add_prefix_space))
        return
    scheme = "always" if settings.get("legacy") else "first"
    scheme = scheme if add_prefix_space in (None, True) else "never"
    pre: Any = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    decoder = sentencepiece_decoder(has_first_space=scheme != "never")
    fast.normalizer, fast.pre_tokenizer, fast.decoder = None, pre, decoder
