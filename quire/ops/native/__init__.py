"""The compiled CPU kernels of `csrc/`: the library, packed matrices, and programs of kernel calls."""
