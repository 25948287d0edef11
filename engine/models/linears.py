"""Makes a layer's matrices: plain or FP8, as the configuration says."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.engine.layers.fp8_linear import Fp8Linear
from tandem.engine.layers.linear import Linear, LinearBase
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.quantization import Quantization


@dataclass(frozen=True, slots=True)
class Linears:
    """Attributes: layer: its index; dtype: of plain weights and biases."""

    config: ModelConfig
    layer: int
    dtype: torch.dtype
    device: torch.device

    def make(self, names: Sequence[str], out_sizes: list[int], in_size: int, bias: bool) -> LinearBase:
        """Makes one matrix of merged projections. Args: names: below model.layers.N.

        Raises:
            ValueError: only some of the projections are FP8, or sizes do not fit FP8.
        """
        modules = [self.module(name) for name in names]
        quantization = self.quantization(modules)
        if quantization is None:
            return Linear(out_sizes, in_size, bias, self.dtype, self.device)
        return Fp8Linear(modules, out_sizes, in_size, bias, quantization, self.dtype, self.device)

    def module(self, name: str) -> str:
        return f"model.layers.{self.layer}.{name}"

    def quantization(self, modules: Sequence[str]) -> Quantization | None:
        """Returns None for plain modules. Raises ValueError if only some are FP8."""
        quantization = self.config.quantization
        return quantization if quantization is not None and quantization.covers(modules) else None
