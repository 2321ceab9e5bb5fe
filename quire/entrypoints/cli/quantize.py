"""`quire quantize`: writes a checkpoint in fewer bits, which Quire, vLLM and transformers load.

Knows the flags alone; `quire.entrypoints.cli.quantize_model` does the work, and brings torch.
"""

import signal
from argparse import ArgumentParser, Namespace
from typing import Literal

from quire.entrypoints.cli.files import user_path
from quire.entrypoints.cli.flags import add_counts, add_typed_flag
from quire.errors import ConfigError

METHODS = {
    "gptq": "4 bits (or 8) in GPTQ's layout: the error of each column is made good by the others",
    "awq": "4 bits in AWQ's: columns that matter are scaled up before",
    "int4": "4 bits to the nearest, in compressed-tensors'",
    "int8": "8 bits to the nearest, a scale for each row, in compressed-tensors'",
    "fp8": "8-bit floats, a scale for each row, for activations of 8 bits, in compressed-tensors'",
}


def add_flags(parser: ArgumentParser) -> None:
    """The flags of `quire quantize`."""
    parser.usage = "%(prog)s MODEL OUT --method METHOD [options]"
    parser.add_argument("model", metavar="MODEL", help="model directory or hub id, not quantized")
    parser.add_argument("out", metavar="OUT", type=user_path, help="folder to write, which is new or empty")
    parser.add_argument("--method", required=True, choices=[*METHODS], help="; ".join(map(": ".join, METHODS.items())))
    add = parser.add_argument
    add("--calibration", metavar="FILE", type=user_path, help="UTF-8 text like the model's own (default: stories)")
    add_counts(parser, ("--num-samples", 128, "sequences of it, an eighth held out"))
    add_counts(parser, ("--length", 512, "tokens of each, at most"))
    add_typed_flag(parser, "bits", Literal[4, 8], None, "Of gptq's codes (default: 4).")
    size_help = "columns that share a scale, -1 for rows (default: 128, or less as sizes demand; int8, fp8: rows)"
    add("--group-size", type=int, metavar="N", help=size_help)
    add("--desc-act", action="store_true", help="gptq: the most active columns first; better, and slower to run")
    add("--damp", type=float, metavar="X", default=0.01, help="gptq: added to the Hessian's diagonal (default: 0.01)")
    add("--revision", metavar="TEXT", help="branch, tag or commit of a hub id")


def run(namespace: Namespace) -> None:
    """Quantize, and say what it cost."""
    out, method = namespace.out.resolve(), namespace.method  # a link's target: a folder takes its place in the end
    if out.exists() and (not out.is_dir() or any(out.iterdir()) or out.is_mount()):
        raise ConfigError(f"{out} is not empty, or a disk of its own: name a new folder, or remove what is there.")
    if method != "gptq" and (hasattr(namespace, "bits") or namespace.desc_act):
        raise ConfigError(f"--bits and --desc-act are gptq's; {method} has neither.")
    if method in ("int8", "fp8") and namespace.group_size not in (None, -1):
        raise ConfigError(f"--group-size {namespace.group_size}: {method} has one scale for each row; leave it out.")
    if namespace.group_size is not None and namespace.group_size < 1 and namespace.group_size != -1:
        raise ConfigError(f"--group-size {namespace.group_size}: give how many columns share a scale, or -1 for rows.")
    if not 0 < namespace.damp < 1:
        raise ConfigError(f"--damp is a part of the diagonal's mean, between 0 and 1; got {namespace.damp}.")
    from quire.entrypoints.cli.quantize_model import quantize_checkpoint  # with torch: --help is quick without

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is half written goes, as at a Ctrl-C
    print(quantize_checkpoint(namespace, out))
