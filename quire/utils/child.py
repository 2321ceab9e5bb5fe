"""The environment of Python processes that Quire starts of itself: they import the very Quire that started them."""

import os
from pathlib import Path


def child_environment() -> dict[str, str]:
    """This process's environment, with this copy of Quire first among what `python -P -m` finds."""
    root = str(Path(__file__).resolve().parents[2])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
