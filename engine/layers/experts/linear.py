"""Projections of all experts of a layer, stacked."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch

from tandem.engine.layers.fp8 import FP8_DTYPE, dequantize
from tandem.engine.layers.fp8_linear import check_sizes
from tandem.engine.models.experts import ExpertsConfig
from tandem.engine.models.quantization import BLOCK, InputScales, Quantization

# Plain numbers, or FP8 with a scale per output or per block.
Kind = Literal["plain", "channel", "block"]
# In the order of the kernels' macros.
KINDS: tuple[Kind, ...] = ("plain", "channel", "block")


class ExpertShare(NamedTuple):
    """The part of a layer's experts that one device holds. The outputs of all devices' parts sum to the layer's.

    Attributes:
        first, num_experts: its experts.
        offset, size: its part of the intermediate size, in numbers.
    """

    first: int
    num_experts: int
    offset: int
    size: int

    @property
    def has_shared(self) -> bool:
        """True of one share alone, which also holds the layer's shared expert: that of the first expert's first
        numbers."""
        return self.first == 0 and self.offset == 0

    def check(self, experts: ExpertsConfig, quantization: Quantization | None) -> None:
        """Raises ValueError unless the share is a part of the layer's experts, between blocks of weights."""
        if not 0 <= self.first < self.first + self.num_experts <= experts.num_experts:
            raise ValueError(
                f"experts {self.first} to {self.first + self.num_experts - 1} are no part of {experts.count_key} "
                f"{experts.num_experts}"
            )
        if not 0 <= self.offset < self.offset + self.size <= experts.intermediate_size:
            raise ValueError(
                f"{self.size} numbers from {self.offset} on are no part of {experts.size_key} "
                f"{experts.intermediate_size}"
            )
        if quantization is not None and quantization.weights == "block" and self.offset % BLOCK:
            raise ValueError(f"a share of {experts.size_key} begins at {self.offset}, no multiple of {BLOCK}")


class ExpertLinear:
    """
    Attributes:
        weight: (num_experts, sum(out_sizes), in_size) of the model's dtype, or float8_e4m3fn.
        scale: float32 weight scales: (num_experts, sum(out_sizes), 1), or (num_experts, sum(out_sizes) / BLOCK, in_size
            / BLOCK) for blocks; None unless FP8.
        inputs: scales of the quantized inputs; None unless FP8.
        input_scale: (1,) float32, the largest of the experts held; None unless inputs are "static".
    """

    def __init__(
        self,
        num_experts: int,
        out_sizes: Sequence[int],
        in_size: int,
        quantization: Quantization | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Args: quantization: None: plain weights."""
        self._out_sizes = out_sizes
        out_size = sum(out_sizes)
        self.is_block = quantization is not None and quantization.weights == "block"
        self.scale: torch.Tensor | None = None
        self.inputs: InputScales | None = None
        self.input_scale: torch.Tensor | None = None
        self._input_scales: torch.Tensor | None = None
        if quantization is None:
            self.weight = _empty_weight(num_experts, out_size, in_size, dtype, device)
            return
        self.weight = torch.empty(num_experts, out_size, in_size, dtype=FP8_DTYPE, device=device)
        shape = (out_size // BLOCK, in_size // BLOCK) if self.is_block else (out_size, 1)
        self.scale = torch.empty(num_experts, *shape, device=device)
        self.inputs = quantization.inputs
        if self.inputs == "static":
            self._input_scales = torch.empty(num_experts, len(out_sizes), device=device)

    @property
    def kind(self) -> Kind:
        if self.scale is None:
            return "plain"
        return "block" if self.is_block else "channel"

    @property
    def num_experts(self) -> int:
        return len(self.weight)

    def of_expert(self, expert: int) -> torch.Tensor:
        """Returns the matrix of one expert, (sum(out_sizes), in_size), with FP8 numbers as float32."""
        weight = self.weight[expert]
        return weight if self.scale is None else dequantize(weight, self.scale[expert])

    def named_parameters(self, modules: Sequence[Sequence[str]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields views of each expert's parameters as a checkpoint has them.

        Args:
            modules: for each expert the names of its projections.
        """
        num_rows = [size // BLOCK if self.is_block else size for size in self._out_sizes]
        for expert, names in enumerate(modules):
            for name, weight in zip(names, self.weight[expert].split(self._out_sizes), strict=True):
                yield f"{name}.weight", weight
            if self.scale is not None:
                for name, scale in zip(names, self.scale[expert].split(num_rows), strict=True):
                    yield f"{name}.weight_scale", scale
            if self._input_scales is not None:
                for name, scale in zip(names, self._input_scales[expert], strict=True):
                    yield f"{name}.input_scale", scale

    def stacked_parameters(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield f"{name}.weight", self.weight
        if self.scale is not None:
            yield f"{name}.weight_scale", self.scale
        if self._input_scales is not None:
            yield f"{name}.input_scale", self._input_scales

    def loaded(self) -> None:
        if self._input_scales is not None:
            self.input_scale = self._input_scales.max().view(1)


def check_expert_sizes(
    modules: Sequence[str], out_sizes: Sequence[int], in_size: int, quantization: Quantization | None
) -> None:
    """Raises ValueError if an expert's matrix is not divisible into blocks, or for FP8 products."""
    if quantization is not None:
        check_sizes(modules, out_sizes, in_size, quantization.weights == "block")


def _empty_weight(
    num_experts: int, out_size: int, in_size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Row-major on a GPU, column-major on a CPU, as layers/linear.py's matrices."""
    if device.type == "cuda":
        return torch.empty(num_experts, out_size, in_size, dtype=dtype, device=device)
    return torch.empty(num_experts, in_size, out_size, dtype=dtype, device=device).transpose(1, 2)
