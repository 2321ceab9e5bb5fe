"""The weights of what another stage of the model computes: there are none here, and nothing multiplies with them."""

from quire.quantization.base import MatrixShape, TensorForm
from quire.quantization.unquantized import Unquantized


class Elsewhere(Unquantized):
    """Of whose tensors a checkpoint has none for this stage, and so there are no parameters."""

    groups = False

    def checkpoint_tensors(self, shape: MatrixShape) -> dict[str, TensorForm]:
        return {}
