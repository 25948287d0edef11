"""Products of sorted rows with their experts' matrices (expert_products.cu). Needs CUDA, compute capability 9.0."""

import math
from typing import Any, NamedTuple

import torch

from tandem.engine.layers.cuda_kernel import SWIZZLE, CudaKernel, tensor_map
from tandem.engine.layers.experts.permutation import Permutation
from tandem.engine.layers.fp8 import FP8_DTYPE
from tandem.engine.layers.fp8_quantize import Quantized
from tandem.engine.models.quantization import BLOCK, InputScales

# Places, and weight rows, of a block's tile.
TILE_ROWS, TILE_COLUMNS = 128, 256
# Weight rows whose order in a tile gives a thread consecutive outputs, in parts, and of a box.
ROW_GROUP = 4, 4, 2
BOX_GROUPS = TILE_COLUMNS // 2 // math.prod(ROW_GROUP)
# More steps in flight slow bfloat16 products of large matrices by up to 30 %, measured on an H100.
NUM_STAGES, NUM_FP8_STAGES = 3, 4
# Stages are aligned to swizzle patterns.
ALIGNMENT = 1024
NUM_THREADS = 384
PLAIN, CHANNEL, BLOCKS = range(3)
OUT_PLAIN, OUT_GROUPS, OUT_STATIC = range(3)


class ExpertMatrices(NamedTuple):
    """One matrix of each of this device's experts.

    Attributes:
        weight: (num_experts, out_size, in_size) bfloat16 or float8_e4m3fn, contiguous.
        scale: of FP8 weights, float32: (num_experts, out_size, 1) or (num_experts, out_size / BLOCK, in_size / BLOCK).
        inputs: scales of the inputs of FP8 products.
        input_scale: (1,) float32; None unless inputs are "static".
    """

    weight: torch.Tensor
    scale: torch.Tensor | None = None
    inputs: InputScales = "token"
    input_scale: torch.Tensor | None = None

    @property
    def kind(self) -> int:
        if self.scale is None:
            return PLAIN
        return BLOCKS if self.scale.shape[2] != 1 or self.scale.shape[1] != self.weight.shape[1] else CHANNEL


class ExpertProducts:
    """The kernel, in the variants that a model needs."""

    def __init__(self, device: torch.device) -> None:
        properties: Any = torch.cuda.get_device_properties(device)
        self._device = device
        self._num_blocks = properties.multi_processor_count
        self._kernels: dict[tuple[int, bool, int], CudaKernel] = {}

    def gate_up(
        self, x: torch.Tensor | Quantized, matrices: ExpertMatrices, down: ExpertMatrices, permutation: Permutation
    ) -> torch.Tensor | Quantized:
        """Returns silu(gate) * up of each place, (num_places, out_size), computed in float32.

        Quantized if it is the input of an FP8 product with group or static scales, otherwise bfloat16.

        Args:
            x: inputs of the tokens, (num_tokens, in_size) bfloat16, or Quantized for FP8 weights.
            matrices: (num_experts, 2 * out_size, in_size): gate, then up.
            down: the matrices that multiply the result.
        """
        num_places, out_size = permutation.order.numel(), matrices.weight.shape[1] // 2
        out_kind = OUT_PLAIN if down.kind == PLAIN or down.inputs == "token" else OUT_GROUPS
        out_scales = None
        if out_kind != OUT_PLAIN and down.inputs == "static":
            out_kind, out_scales = OUT_STATIC, down.input_scale
        elif out_kind == OUT_GROUPS:
            out_scales = torch.empty(out_size // BLOCK, num_places, device=self._device)
        dtype = torch.bfloat16 if out_kind == OUT_PLAIN else FP8_DTYPE
        out = torch.empty(num_places, out_size, dtype=dtype, device=self._device)
        self._launch(x, matrices, permutation, out, out_scales, out_kind, k=permutation.places.shape[1])
        if out_kind == OUT_PLAIN:
            return out
        assert out_scales is not None
        return Quantized(out, out_scales if out_kind == OUT_STATIC else out_scales.t(), num_places)

    def down(self, x: torch.Tensor | Quantized, matrices: ExpertMatrices, permutation: Permutation) -> torch.Tensor:
        """Returns the product of each place, (num_places, out_size) bfloat16. Args: x: of each place."""
        out_size = matrices.weight.shape[1]
        out = torch.empty(permutation.order.numel(), out_size, dtype=torch.bfloat16, device=self._device)
        self._launch(x, matrices, permutation, out, None, OUT_PLAIN)
        return out

    def _launch(
        self,
        x: torch.Tensor | Quantized,
        matrices: ExpertMatrices,
        permutation: Permutation,
        out: torch.Tensor,
        out_scales: torch.Tensor | None,
        out_kind: int,
        k: int = 0,
    ) -> None:
        """Args: k: gathers the rows of x by token if not 0."""
        numbers, scales = (x.numbers, x.scales) if isinstance(x, Quantized) else (x, None)
        num_scales = 0
        if scales is not None:
            num_scales = scales.stride(1) if matrices.kind == BLOCKS else scales.stride(0) if len(scales) > 1 else 0
        depth = SWIZZLE // numbers.element_size()
        groups = matrices.weight.view(-1, *ROW_GROUP, numbers.shape[1]).transpose(1, 2)
        kernel = self._kernel(matrices.kind, k > 0, out_kind)
        kernel.launch(
            (self._num_blocks, 1),
            NUM_THREADS,
            tensor_map(numbers, (TILE_ROWS, depth)),
            tensor_map(groups, (BOX_GROUPS, *ROW_GROUP, depth)),
            numbers,
            permutation.order,
            permutation.tiles,
            scales,
            matrices.scale,
            out,
            out_scales,
            k,
            out.shape[1],
            numbers.shape[1],
            num_scales,
            len(out),
        )

    def _kernel(self, kind: int, is_gated: bool, out_kind: int) -> CudaKernel:
        key = kind, is_gated, out_kind
        if key not in self._kernels:
            num_stages = NUM_STAGES if kind == PLAIN else NUM_FP8_STAGES
            macros = dict(zip(("KIND", "GATED", "OUT"), map(int, key), strict=True)) | {"STAGES": num_stages}
            shared_bytes = num_stages * (TILE_ROWS + TILE_COLUMNS) * SWIZZLE + ALIGNMENT
            self._kernels[key] = CudaKernel(
                __package__, "expert_products", macros, self._device, shared_bytes=shared_bytes, is_specific=True
            )
        return self._kernels[key]
