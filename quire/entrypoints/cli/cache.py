"""`quire cache`: what is kept of packed weights on this machine's disk, and how to be rid of it.

Reads the folder's files alone: no model is loaded and no torch comes in.
"""

import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from quire.entrypoints.cli.files import user_path
from quire.entrypoints.cli.flags import human_bytes, print_table
from quire.errors import ConfigError
from quire.utils.suggest import hint
from quire.worker.blockfiles import block_paths
from quire.worker.weights.cache import StoredWeights, cache_folder, remove, stored_weights

_UNITS = (("day", 86400), ("hour", 3600), ("minute", 60))


def add_flags(parser: ArgumentParser) -> None:
    """The flags of `quire cache`."""
    parser.usage = "%(prog)s [list] | %(prog)s clear NAME | %(prog)s clear --all"
    actions_help = "what to do (default: list)"
    parser.add_argument("action", nargs="?", choices=["list", "clear"], default="list", help=actions_help)
    parser.add_argument("name", nargs="?", metavar="NAME", help="model, or file, to clear")
    parser.add_argument("--kv-cache-dir", metavar="DIR", type=user_path, help="of prefixes kept there, not of weights")
    parser.add_argument("--all", action="store_true", help="clear everything")


def run(namespace: Namespace) -> None:
    """List or clear."""
    if namespace.action == "list" and (namespace.name or namespace.all):
        raise ConfigError("'quire cache list' takes no name; 'quire cache clear NAME' removes that one.")
    if namespace.kv_cache_dir is not None:
        return _tell_of_blocks(namespace.kv_cache_dir, namespace.action == "clear", namespace.all)
    if (folder := cache_folder()) is None:
        raise ConfigError("nothing is kept: this user has no home; set XDG_CACHE_HOME.")
    try:
        files = stored_weights(folder)
    except OSError as error:
        raise ConfigError(f"{folder} can't be read: {error.strerror}.") from error
    if namespace.action == "list":
        _show(files)
        print(f"{human_bytes(sum(each.num_bytes for each in files))} in {len(files)} of {folder}")
        return
    if namespace.all == bool(namespace.name):  # an empty name is a variable that was not set
        raise ConfigError("name one model, as 'quire cache' lists it, or give --all.")
    chosen = [each for each in files if namespace.all or namespace.name in (each.model, each.path.name, each.path.stem)]
    if not chosen and not namespace.all:
        remedy = hint(namespace.name, [each.model for each in files], "'quire cache' lists what there is.")
        raise ConfigError(f"nothing of {namespace.name!r} is kept. {remedy}")
    for each in chosen:
        remove(each.path)
    kept = [each for each in chosen if each.path.exists()]
    print(f"removed {human_bytes(sum(each.num_bytes for each in chosen if each not in kept))}")
    if kept:
        raise ConfigError(f"{len(kept)} of them can't be removed: {kept[0].path} is not yours to remove.")


def _tell_of_blocks(folder: Path, clear: bool, everything: bool) -> None:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder.")
    if clear and not everything:
        raise ConfigError("prefixes have no names of their own: give --all.")
    paths = list(block_paths(folder))
    num_bytes = sum(path.stat().st_size for path in paths if path.exists())
    for path in paths if clear else ():
        remove(path)
    if clear and (kept := [path for path in paths if path.exists()]):
        raise ConfigError(f"{len(kept)} of {len(paths)} blocks can't be removed: {kept[0]} is not yours to remove.")
    num_models = len({path.parent.parent for path in paths})
    models = f"{num_models} {'model' if num_models == 1 else 'models'}"
    print(f"{'removed ' if clear else ''}{human_bytes(num_bytes)} in {len(paths)} blocks of {models}")


def _show(files: list[StoredWeights]) -> None:
    rows = [("MODEL", "WEIGHTS", "SIZE", "LAST USED", "FILE")]
    for each in files:
        model = each.model or "(of another version)"
        rows.append((model, each.weights, human_bytes(each.num_bytes), _age(time.time() - each.used), each.path.name))
    print_table(rows)


def _age(seconds: float) -> str:
    counts = ((int(seconds // length), unit) for unit, length in _UNITS)
    return next((f"{count} {unit}{'s' if count > 1 else ''} ago" for count, unit in counts if count > 0), "just now")
