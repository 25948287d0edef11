"""Projections whose weights are FP8."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from tandem.engine.layers.fp8 import FP8_DTYPE, as_quantized, dequantize
from tandem.engine.layers.linear import LinearBase
from tandem.engine.models.quantization import BLOCK, Quantization

# Matrix products of FP8 numbers are made for multiples of this.
MULTIPLE = 16
# cuBLAS multiplies blocks on Hopper alone, from this version of CUDA on, and rows of a multiple of so many blocks.
LIBRARY_BLOCKS_MAJOR = 9
LIBRARY_BLOCKS_CUDA = (12, 9)
LIBRARY_BLOCKS_MULTIPLE = 4


class Fp8Linear(LinearBase):
    """FP8 weights with their scales; inputs are quantised before they are multiplied.

    Projections that are one matrix keep the scales that each of them has. Called, it computes in plain torch what
    quantised products come to, with weights and inputs as they are after rounding: the reference for kernels.

    Attributes:
        weight: (sum(out_sizes), in_size) float8_e4m3fn.
        scale: of weights, float32: (sum(out_sizes), 1), or (sum(out_sizes) / BLOCK, in_size / BLOCK) for blocks.
        inputs: how inputs are quantised.
        input_scale: (1,) float32; None unless inputs are "static". Where projections of one input have different ones
            it is the largest: no number that fits any of them is cut.
    """

    def __init__(
        self,
        modules: Sequence[str],
        out_sizes: list[int],
        in_size: int,
        bias: bool,
        quantization: Quantization,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            modules: the projections' names, for messages.
            out_sizes, bias: as for Linear.
            dtype: of the bias.

        Raises:
            ValueError: blocks or products do not divide the matrix.
        """
        self.is_block = quantization.weights == "block"
        check_sizes(modules, out_sizes, in_size, self.is_block)
        out_size = sum(out_sizes)
        weight = torch.empty(out_size, in_size, dtype=FP8_DTYPE, device=device)
        super().__init__(out_sizes, weight, torch.empty(out_size, dtype=dtype, device=device) if bias else None)
        shape = (out_size // BLOCK, in_size // BLOCK) if self.is_block else (out_size, 1)
        self.scale = torch.empty(shape, device=device)
        self.inputs = quantization.inputs
        self.input_scale: torch.Tensor | None = None
        # As they are loaded, one for each projection.
        self._input_scales = torch.empty(len(out_sizes), device=device) if self.inputs == "static" else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight = dequantize(self.weight, self.scale).to(x.dtype)
        return F.linear(as_quantized(x, self.inputs, self.input_scale), weight, self.bias)

    def named_parameters(self, *names: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Beside weights and biases the scales, (out_size, 1) or (out_size / BLOCK, in_size / BLOCK), and those of
        inputs, ()."""
        yield from super().named_parameters(*names)
        num_rows = [size // BLOCK if self.is_block else size for size in self._out_sizes]
        for name, scale in zip(names, self.scale.split(num_rows), strict=True):
            yield f"{name}.weight_scale", scale
        if self._input_scales is not None:
            for name, scale in zip(names, self._input_scales, strict=True):
                yield f"{name}.input_scale", scale

    def loaded(self) -> None:
        if self._input_scales is not None:
            self.input_scale = self._input_scales.max().view(1)


def library_has_blocks(capability: tuple[int, int], cuda_version: str) -> bool:
    """Whether torch._scaled_mm multiplies matrices with scales of blocks.

    Args:
        capability: the GPU's compute capability.
        cuda_version: that torch is made for, such as "12.8".
    """
    version = tuple(map(int, cuda_version.split(".")[:2]))
    return capability[0] == LIBRARY_BLOCKS_MAJOR and version >= LIBRARY_BLOCKS_CUDA


def check_sizes(modules: Sequence[str], out_sizes: Sequence[int], in_size: int, is_block: bool) -> None:
    """Raises ValueError, which names the projection, if blocks or products do not divide its matrix."""
    multiple, what = (BLOCK, f"blocks of {BLOCK}x{BLOCK}") if is_block else (MULTIPLE, "products of FP8 numbers")
    for module, out_size in zip(modules, out_sizes, strict=True):
        if out_size % multiple or in_size % multiple:
            raise ValueError(
                f"{module} is ({out_size}, {in_size}), but {what} are supported for multiples of {multiple} alone"
            )
