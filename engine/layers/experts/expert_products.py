"""Products of sorted rows with their experts' matrices (expert_products.cu). Needs CUDA, compute capability 9.0."""

import math
from typing import Any

import torch

from tandem.engine.layers.cuda_kernel import SWIZZLE, CudaKernel, tensor_map
from tandem.engine.layers.experts.linear import KINDS, ExpertLinear, Kind
from tandem.engine.layers.experts.permutation import Permutation
from tandem.engine.layers.fp8 import FP8_DTYPE
from tandem.engine.layers.fp8_quantize import Quantized
from tandem.engine.models.quantization import BLOCK

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
CLUSTER = 2
OUT_PLAIN, OUT_GROUPS, OUT_STATIC = range(3)


class ExpertProducts:
    """The kernel, in the variants that a model needs."""

    def __init__(self, device: torch.device) -> None:
        properties: Any = torch.cuda.get_device_properties(device)
        self._device = device
        self._num_blocks = properties.multi_processor_count // CLUSTER * CLUSTER
        self._kernels: dict[tuple[Kind, bool, int], CudaKernel] = {}

    def gate_up(
        self, x: torch.Tensor | Quantized, linear: ExpertLinear, down: ExpertLinear, permutation: Permutation
    ) -> torch.Tensor | Quantized:
        """Returns silu(gate) * up of each place, (num_places, out_size), computed in float32.

        Quantized if it is the input of an FP8 product with group or static scales, otherwise bfloat16.

        Args:
            x: inputs of the tokens, (num_tokens, in_size) bfloat16, or Quantized for FP8 weights.
            linear: gate, then up, which have the same size.
            down: multiplies the result.
        """
        num_places, out_size = permutation.order.numel(), linear.weight.shape[1] // 2
        out_kind = OUT_PLAIN if down.inputs in (None, "token") else OUT_GROUPS
        out_scales = None
        if out_kind != OUT_PLAIN and down.inputs == "static":
            out_kind, out_scales = OUT_STATIC, down.input_scale
        elif out_kind == OUT_GROUPS:
            out_scales = torch.empty(out_size // BLOCK, num_places, device=self._device)
        dtype = torch.bfloat16 if out_kind == OUT_PLAIN else FP8_DTYPE
        out = torch.empty(num_places, out_size, dtype=dtype, device=self._device)
        self._launch(x, linear, permutation, out, out_scales, out_kind, k=permutation.places.shape[1])
        if out_kind == OUT_PLAIN:
            return out
        assert out_scales is not None
        return Quantized(out, out_scales if out_kind == OUT_STATIC else out_scales.t(), num_places)

    def down(self, x: torch.Tensor | Quantized, linear: ExpertLinear, permutation: Permutation) -> torch.Tensor:
        """Returns the product of each place, (num_places, out_size) bfloat16. Args: x: of each place."""
        out_size = linear.weight.shape[1]
        out = torch.empty(permutation.order.numel(), out_size, dtype=torch.bfloat16, device=self._device)
        self._launch(x, linear, permutation, out, None, OUT_PLAIN)
        return out

    def _launch(
        self,
        x: torch.Tensor | Quantized,
        linear: ExpertLinear,
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
            num_scales = scales.stride(1) if linear.is_block else scales.stride(0) if len(scales) > 1 else 0
        depth = SWIZZLE // numbers.element_size()
        groups = linear.weight.view(-1, *ROW_GROUP, numbers.shape[1]).transpose(1, 2)
        kernel = self._kernel(linear.kind, k > 0, out_kind)
        kernel.launch(
            (self._num_blocks, 1),
            NUM_THREADS,
            tensor_map(numbers, (TILE_ROWS, depth)),
            tensor_map(groups, (BOX_GROUPS, *ROW_GROUP, depth)),
            numbers,
            permutation.order,
            permutation.tiles,
            scales,
            linear.scale,
            out,
            out_scales,
            k,
            out.shape[1],
            numbers.shape[1],
            num_scales,
            len(out),
        )

    def _kernel(self, kind: Kind, is_gated: bool, out_kind: int) -> CudaKernel:
        key = kind, is_gated, out_kind
        if key not in self._kernels:
            num_stages = NUM_STAGES if kind == "plain" else NUM_FP8_STAGES
            macros = {
                "KIND": KINDS.index(kind),
                "GATED": int(is_gated),
                "OUT": out_kind,
                "STAGES": num_stages,
                "CLUSTER": CLUSTER,
            }
            shared_bytes = num_stages * (TILE_ROWS + TILE_COLUMNS) * SWIZZLE + ALIGNMENT
            self._kernels[key] = CudaKernel(
                __package__,
                "expert_products",
                macros,
                self._device,
                shared_bytes=shared_bytes,
                is_specific=True,
                cluster=CLUSTER,
            )
        return self._kernels[key]
