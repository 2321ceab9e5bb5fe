"""Rotary position embedding, with the ways of stretching it that the supported families use.

All angles are computed once, when the model is built, and looked up by position: a token's rotation depends on its
position alone. One table serves every layer of a model that rotates alike.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.errors import ModelLoadError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RopeParameters:
    """What the angles of a model depend on.

    Attributes:
        size: features of a head that are rotated.
        values: config.json's rope parameters, "rope_type" and "rope_theta" among them.
        max_position: config.json's max_position_embeddings.
        max_model_len: positions that will be asked for.
    """

    size: int
    values: Mapping[str, Any]
    max_position: int
    max_model_len: int

    def number(self, key: str, default: float | None = None) -> float:
        """A value of the rope parameters; null counts as absent."""
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise ModelLoadError(f"rope parameters of type {self.values['rope_type']!r} lack {key!r} in config.json.")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(f"config.json has {key} = {value!r} among its rope parameters; it must be a number.")
        return float(value)

    @property
    def original_max_position(self) -> float:
        """Positions that the model was trained with before stretching."""
        return self.number("original_max_position_embeddings", self.max_position)


def rope_table(rope: RopeParameters) -> Tensor:
    """Cosines, then sines, of every position's angles: fp32 [max_model_len, size].

    With "llama_4_scaling_beta" queries have a table of their own, [2, max_model_len, size] then: beyond the trained
    length their scores grow with the logarithm of the position, as in Llama 4 and Ministral 3.

    Raises:
        ModelLoadError: a rope type that is not supported, or whose parameters are incomplete.
    """
    kind = rope.values["rope_type"]
    if kind not in ROPE_TYPES:
        raise ModelLoadError(f"rope type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}.")
    try:
        frequencies, amplitude = ROPE_TYPES[kind](rope)
    # A base of 1, a logarithm of what is not over 0, factors that are no numbers.
    except (ArithmeticError, ValueError, TypeError, RuntimeError) as error:
        raise ModelLoadError(f"rope parameters {dict(rope.values)!r} give no angles ({error}).") from error
    positions = torch.arange(rope.max_model_len, dtype=torch.float32)[:, None]
    angles = positions * frequencies
    table = torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(amplitude)
    if not (beta := rope.number("llama_4_scaling_beta", 0.0)):
        return table
    growth = 1 + beta * torch.log1p(torch.floor(positions / rope.original_max_position))
    return torch.stack((table, table * growth))


def _inverse_frequencies(size: int, base: float) -> Tensor:
    """Radians per position of each plane, fp32 [size / 2] (arXiv:2104.09864)."""
    return 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)


def _default(rope: RopeParameters) -> tuple[Tensor, float]:
    """Each frequency may be divided by a factor of its own, as GGUF files have Llama 3.1's scaling."""
    divisors = torch.tensor(rope.values.get("factors", 1.0))
    return _inverse_frequencies(rope.size, rope.number("rope_theta")) / divisors, 1.0


def _linear(rope: RopeParameters) -> tuple[Tensor, float]:
    """Position interpolation (arXiv:2306.15595): all positions are divided by the factor."""
    return _inverse_frequencies(rope.size, rope.number("rope_theta")) / rope.number("factor"), 1.0


def _dynamic(rope: RopeParameters) -> tuple[Tensor, float]:
    """NTK-aware scaling, fixed for the longest sequence that can come.

    transformers widens the base as a sequence grows, which changes the rotation of keys that are cached already: a
    token's key would depend on the tokens after it. Here the base is the one that transformers reaches at
    max_model_len tokens. So both agree for max_model_len <= max_position_embeddings (nothing is scaled), and for a
    sequence of exactly max_model_len tokens computed at once; with max_model_len = max_position_embeddings * factor,
    the default, it is vLLM's base too.
    """
    factor = rope.number("factor")
    stretch = max(1.0, rope.max_model_len / rope.max_position)
    widening = (factor * stretch - (factor - 1.0)) ** (rope.size / (rope.size - 2))
    return _inverse_frequencies(rope.size, rope.number("rope_theta") * widening), 1.0


def _yarn(rope: RopeParameters) -> tuple[Tensor, float]:
    """YaRN (arXiv:2309.00071): fast planes are kept, slow ones interpolated, those between blended by a ramp."""
    base, original = rope.number("rope_theta"), rope.original_max_position
    factor = rope.number("factor", rope.max_position / original)

    def plane_of(turns: float) -> float:
        """The plane, as a real number, that turns so often over the original context."""
        return rope.size * math.log(original / (turns * 2.0 * math.pi)) / (2.0 * math.log(base))

    low, high = plane_of(rope.number("beta_fast", 32.0)), plane_of(rope.number("beta_slow", 1.0))
    if rope.values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.size - 1)
    ramp = ((torch.arange(rope.size // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    frequencies = _inverse_frequencies(rope.size, base)
    return frequencies / factor * ramp + frequencies * (1.0 - ramp), _yarn_amplitude(rope, factor)


def _yarn_amplitude(rope: RopeParameters, factor: float) -> float:
    """The factor on cosines and sines that tempers the softmax of a stretched context."""

    def temper(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    over, under = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    return rope.number("attention_factor", temper(over) / temper(under) if over and under else temper(1.0))


def _llama3(rope: RopeParameters) -> tuple[Tensor, float]:
    """Llama 3.1's scaling: planes of long wavelength are interpolated, short ones kept, blended between."""
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    frequencies = _inverse_frequencies(rope.size, rope.number("rope_theta"))
    turns = frequencies * (rope.original_max_position / (2.0 * math.pi))  # over the original context
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * kept + frequencies / rope.number("factor") * (1.0 - kept), 1.0


def _longrope(rope: RopeParameters) -> tuple[Tensor, float]:
    """LongRoPE (arXiv:2402.13753): each plane is divided by a factor of its own, for long texts by another.

    transformers changes to those as a sequence outgrows the trained length, when keys are cached already: here
    max_model_len decides for all sequences, as in vLLM.
    """
    original = rope.original_max_position
    key = "long_factor" if rope.max_model_len > original else "short_factor"
    divisors = torch.tensor(rope.values.get(key))
    if divisors.shape != (rope.size // 2,):
        raise ModelLoadError(f"config.json has {key} = {rope.values[key]!r}; it must be {rope.size // 2} numbers.")
    if key == "long_factor":
        logger.info("LongRoPE: factors for long texts; max_model_len = %d or less has those for short ones", original)
    stretch = rope.number("factor", rope.max_position / original)
    amplitude = math.sqrt(1.0 + math.log(stretch) / math.log(original)) if stretch > 1.0 else 1.0
    frequencies = _inverse_frequencies(rope.size, rope.number("rope_theta"))
    return frequencies / divisors, rope.number("attention_factor", amplitude)


ROPE_TYPES: dict[str, Callable[[RopeParameters], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "su": _longrope,  # its first name
    "mrope": _default,  # text has the same position along each of its axes
}
