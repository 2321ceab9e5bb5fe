"""A GGUF model in every format that llama.cpp mixes: python benchmarks/gguf_formats.py MODEL.gguf OUT_DIR [FORMAT ...]

Writes OUT_DIR/FORMAT.gguf of a BF16, F16 or F32 file, for `benchmarks/quantization_loss.py MODEL TEXT --others`. Needs
llama-cpp-python, in an environment of its own.
"""

import argparse
import ctypes
import importlib
from pathlib import Path
from typing import Any

# llama.cpp's numbers (llama_ftype).
FORMATS = {
    "Q2_K": 10, "Q3_K_M": 12, "Q4_0": 2, "Q4_1": 3, "IQ4_NL": 25, "IQ4_XS": 30, "Q4_K_M": 15, "Q5_0": 8, "Q5_1": 9,
    "Q5_K_M": 17, "Q6_K": 18, "Q8_0": 7,
}  # fmt: skip


def main() -> None:
    """Write them, and print each one's size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("formats", nargs="*", default=list(FORMATS))
    args = parser.parse_args()
    llama: Any = importlib.import_module("llama_cpp")
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.formats:
        params = llama.llama_model_quantize_default_params()
        params.ftype = FORMATS[name]
        path = args.out / f"{name}.gguf"
        if llama.llama_model_quantize(bytes(args.model), bytes(path), ctypes.byref(params)):
            raise SystemExit(f"llama.cpp could not make {name}")
        print(f"{path}: {path.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main()
