"""`quire models`, `quire pull`, `quire rm` and `quire show`: models at hand.

The first three are about the hub's cache on this machine's disk, which other programs share; `quire show` tells of any
model. What goes wrong with the hub becomes a line in `quire.utils.hub`.
"""

import shutil
from argparse import ArgumentParser, Namespace
from typing import Any

from quire.entrypoints.cli import plan
from quire.entrypoints.cli.flags import engine_args_from, human_bytes, print_table
from quire.errors import ConfigError
from quire.utils.host_memory import available_memory_bytes
from quire.utils.hub import hub_id, resolve_model_path
from quire.utils.suggest import hint


def add_name_flag(parser: ArgumentParser) -> None:
    """The flag of `quire pull` and `quire rm`."""
    parser.usage = "%(prog)s MODEL"
    parser.add_argument("name", metavar="MODEL", type=hub_id, help="hub id, or the address of its page")


def list_models(_: Namespace) -> None:
    """Show the models in the hub's cache."""
    rows: list[tuple[str, ...]] = [("MODEL", "FORMAT", "SIZE", "FITS")]
    free = available_memory_bytes()
    for model in (models := _cache()):
        files = {file.blob_path: file for revision in model.revisions for file in revision.files}.values()
        form = ".gguf" if any(file.file_name.endswith(".gguf") for file in files) else ".safetensors"
        sizes = [file.size_on_disk for file in files if file.file_name.endswith(form)]
        fits = (min if form == ".gguf" else sum)(sizes or [free]) < free  # a GGUF file is a model by itself
        texts = (form[1:], "yes" if fits else "no") if sizes else ("no weights", "-")
        rows.append((model.repo_id, texts[0], human_bytes(model.size_on_disk), texts[1]))
    print_table(rows)
    print(f"{human_bytes(sum(each.size_on_disk for each in models))} on disk; {human_bytes(free)} of memory are free")


def pull(namespace: Namespace) -> None:
    """Have a model in the hub's cache."""
    print(resolve_model_path(namespace.name))


def remove(namespace: Namespace) -> None:
    """Remove a model from the hub's cache."""
    models = _cache()
    if (model := next((each for each in models if each.repo_id == namespace.name), None)) is None:
        remedy = hint(namespace.name, [each.repo_id for each in models], "'quire models' lists what there is.")
        raise ConfigError(f"{namespace.name!r} is not in the hub's cache. {remedy}")
    try:  # not the client's way, by commits: copies of a model under another name have the same ones
        shutil.rmtree(model.repo_path)
    except OSError as error:
        raise ConfigError(f"{model.repo_path} can't be removed: {error.strerror}.") from None
    print(f"removed {human_bytes(model.size_on_disk)}")


def show(namespace: Namespace) -> None:
    """Tell what a model is, and what it would take."""
    from quire.text.tokenizer import load_tokenizer

    args = engine_args_from(namespace)
    model = args.resolve().model
    template = load_tokenizer(model.path, args.tokenizer_mode).chat_template
    knows = [word for word in ("tools", "enable_thinking") if word in str(template)]
    if not namespace.json:
        print(f"{model.architecture}, {model.num_layers} layers, in {model.path}")
        print(f"context of {model.derived_max_model_len:,} tokens, vocabulary of {model.vocab_size:,}")
        print(f"chat template: {'none' if template is None else ', '.join(['yes', *knows])}")
    plan.run(namespace)


def _cache() -> list[Any]:
    """The models in the hub's cache, as its client describes them."""
    from huggingface_hub import constants, scan_cache_dir  # takes 0.3 s
    from huggingface_hub.errors import CacheNotFound

    try:
        models = [each for each in scan_cache_dir(constants.HF_HUB_CACHE).repos if each.repo_type == "model"]
    except CacheNotFound:
        return []
    except (OSError, ValueError, RuntimeError) as error:  # the last: there is no home
        place, why = constants.HF_HUB_CACHE, str(error).rstrip(".")
        raise ConfigError(f"the hub's cache {place} can't be read: {why}. HF_HOME names another.") from None
    return sorted(models, key=lambda each: each.repo_id)
