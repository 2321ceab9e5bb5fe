"""Which tokenizer an engine uses: the one that its configuration names.

`LLMEngine` and `AsyncLLM` ask while the model loads. It knows options and paths; what a tokenizer does is
`quire.text.tokenizer`'s.
"""

from quire.config.engine_args import EngineConfig
from quire.errors import ModelLoadError
from quire.text.tokenizer import Tokenizer, load_tokenizer
from quire.utils.hub import resolve_model_path


def config_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """The tokenizer that an engine's configuration names; None with skip_tokenizer_init.

    Raises:
        ModelLoadError, NotYetSupportedError: see `load_tokenizer`.
    """
    args, path = config.args, config.model.path
    if args.skip_tokenizer_init:
        return None
    try:
        if args.tokenizer is not None:
            path = resolve_model_path(args.tokenizer, args.tokenizer_revision, cache_dir=args.download_dir)
        return load_tokenizer(path, args.tokenizer_mode)
    except ModelLoadError as error:
        raise ModelLoadError(f"{'tokenizer: ' * (args.tokenizer is not None)}{error}") from None
