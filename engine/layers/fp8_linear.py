from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from tandem.engine.layers.fp8 import FP8_DTYPE, as_quantized, dequantize
from tandem.engine.layers.linear import LinearBase
from tandem.engine.models.quantization import BLOCK, FP8_MULTIPLE, Quantization

# cuBLAS supports block scales only on Hopper, from this CUDA version, for rows of a multiple of this many blocks.
LIBRARY_BLOCKS_MAJOR = 9
LIBRARY_BLOCKS_CUDA = (12, 9)
LIBRARY_BLOCKS_MULTIPLE = 4


class Fp8Linear(LinearBase):
    """FP8 weights with scales; inputs are quantized before the product.

    Projections merged into one matrix keep their own scales. A call computes the quantized product in plain torch, as a
    reference for kernels.

    Attributes:
        weight: (sum(out_sizes), in_size) float8_e4m3fn.
        scale: float32 weight scales: (sum(out_sizes), 1), or (sum(out_sizes) / BLOCK, in_size / BLOCK) for blocks.
        input_scale: (1,) float32; None unless inputs are "static". The largest of the merged projections' scales, so
            that no number saturates that fits one of them.
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
            modules: names of the projections, for messages.
            dtype: dtype of the bias.

        Raises:
            ValueError: the matrix is not divisible into blocks, or for FP8 products.
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
        self._input_scales = torch.empty(len(out_sizes), device=device) if self.inputs == "static" else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight = dequantize(self.weight, self.scale).to(x.dtype)
        return F.linear(as_quantized(x, self.inputs, self.input_scale), weight, self.bias)

    def named_parameters(self, *names: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Also yields weight scales, (out_size, 1) or (out_size / BLOCK, in_size / BLOCK), and input scales, ()."""
        yield from super().named_parameters(*names)
        num_rows = [size // BLOCK if self.is_block else size for size in self._out_sizes]
        for name, scale in zip(names, self.scale.split(num_rows), strict=True):
            yield f"{name}.weight_scale", scale
        if self._input_scales is not None:
            for name, scale in zip(names, self._input_scales, strict=True):
                yield f"{name}.input_scale", scale

    def loaded(self) -> None:
        super().loaded()
        if self._input_scales is not None:
            self.input_scale = self._input_scales.max().view(1)


def library_has_blocks(capability: tuple[int, int], cuda_version: str) -> bool:
    version = tuple(map(int, cuda_version.split(".")[:2]))
    return capability[0] == LIBRARY_BLOCKS_MAJOR and version >= LIBRARY_BLOCKS_CUDA


def check_sizes(modules: Sequence[str], out_sizes: Sequence[int], in_size: int, is_block: bool) -> None:
    """Raises ValueError if a matrix is not divisible into blocks, or for FP8 products."""
    multiple, what = (BLOCK, f"blocks of {BLOCK}x{BLOCK}") if is_block else (FP8_MULTIPLE, "FP8 products")
    for module, out_size in zip(modules, out_sizes, strict=True):
        if out_size % multiple or in_size % multiple:
            raise ValueError(f"{module} is ({out_size}, {in_size}), but {what} need multiples of {multiple}")
