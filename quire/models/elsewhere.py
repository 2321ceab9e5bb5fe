"""The weights of what another stage of the model computes: there are none here, and nothing multiplies with them."""

from quire.quantization.base import MatrixShape, TensorForm, Unquantized


class Elsewhere(Unquantized):
    """Of whose tensors a checkpoint has none for this stage, and so there are no parameters."""

    def checkpoint_tensors(self, shape: MatrixShape) -> dict[str, TensorForm]:
        return {}
