"""Experts of a moderate number of rows, by Triton kernels over tiles of one expert's rows. Needs CUDA."""

from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from tandem.engine.layers.cuda_kernel import has_dependent_launch
from tandem.engine.layers.experts.alignment import MAX_EXPERTS, MAX_PAIRS, Aligner, Alignment
from tandem.engine.layers.experts.grouped_kernels import combine_kernel, down_kernel, gate_up_kernel
from tandem.engine.layers.experts.linear import ExpertLinear
from tandem.engine.layers.experts.tiles import Shape, Tile, Tiles, tiles_for
from tandem.engine.layers.fp8_quantize import Quantized, quantize_rows

# The tensor memory accelerator needs rows of a multiple of this many numbers.
MULTIPLE = 16
# Outputs of a block of the last kernel.
COMBINED = 1024


class GroupedExperts:
    """Sorts pairs of a token and an expert by expert, and multiplies tiles of them.

    FP8 inputs are quantized: once per token before gate and up, and per pair before down.
    """

    def __init__(self, device: torch.device) -> None:
        properties: Any = torch.cuda.get_device_properties(device)
        self._shared_memory = properties.shared_memory_per_block_optin
        self._has_kernels = has_dependent_launch(device)
        self._aligner = Aligner(device)

    def fits(self, gate_up: ExpertLinear) -> bool:
        """Any number of tokens fits."""
        num_experts, num_rows, in_size = gate_up.weight.shape
        return (
            self._has_kernels
            and (gate_up.scale is not None or gate_up.weight.dtype is torch.bfloat16)
            and num_experts <= MAX_EXPERTS
            and in_size % MULTIPLE == 0
            and num_rows // 2 % MULTIPLE == 0
        )

    def forward(
        self,
        xn: torch.Tensor | Quantized,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        residual: torch.Tensor,
        first_expert: int = 0,
    ) -> torch.Tensor:
        """Adds the weighted sum of each token's experts to `residual` in place, and returns it.

        Args:
            xn: (num_tokens, hidden_size) bfloat16, normalized, or quantized as gate_up's inputs.
            weights: (num_tokens, k) float32.
            experts: (num_tokens, k) int32. Those outside gate_up's and down's contribute nothing.
            residual: (num_tokens, hidden_size) bfloat16.
            first_expert: index of the first expert of gate_up and down.
        """
        numbers = xn.numbers if isinstance(xn, Quantized) else xn
        assert all(x.is_contiguous() for x in (numbers, weights, experts, residual))
        k = experts.shape[1]
        if experts.numel() > MAX_PAIRS:
            num_tokens = MAX_PAIRS // k
            for first in range(0, len(weights), num_tokens):
                part = slice(first, min(first + num_tokens, len(weights)))
                some_xn = xn.rows(part) if isinstance(xn, Quantized) else xn[part]
                self.forward(some_xn, weights[part], experts[part], gate_up, down, residual[part], first_expert)
            return residual
        tiles = self.tiles(experts.numel(), down)
        aligned = self._aligner.align(experts, down.num_experts, tiles.rows, first_expert)
        h = self.gate_up(quantized(xn, gate_up), gate_up, aligned, k, tiles.rows, tiles.gate_up)
        y = self.down(quantized(h, down), down, aligned, tiles.rows, tiles.down)
        return self.combine(y, weights, experts, residual, down.num_experts, first_expert)

    def tiles(self, num_pairs: int, down: ExpertLinear) -> Tiles:
        return tiles_for(num_pairs, Shape(down.kind, *down.weight.shape), self._shared_memory)

    def align(self, experts: torch.Tensor, num_experts: int, rows: int, first_expert: int = 0) -> Alignment:
        return self._aligner.align(experts, num_experts, rows, first_expert)

    def gate_up(
        self, x: torch.Tensor | Quantized, linear: ExpertLinear, aligned: Alignment, k: int, rows: int, tile: Tile
    ) -> torch.Tensor:
        """Returns silu(gate) * up of each pair, (num_pairs, size) bfloat16, in the order of aligned.pairs."""
        num_experts, num_outputs, in_size = linear.weight.shape
        size = num_outputs // 2
        numbers, scales, _ = x if isinstance(x, Quantized) else (x, x, len(x))
        max_tiles = aligned.tiles.shape[1]
        h = torch.empty(len(aligned.pairs), size, dtype=torch.bfloat16, device=numbers.device)
        factors = linear.weight.view(2 * num_experts, size, in_size)
        launch: Any = gate_up_kernel[(max_tiles, triton.cdiv(size, tile.outputs))]
        launch(
            numbers,
            scales,
            TensorDescriptor.from_tensor(factors, [1, tile.outputs, tile.depth]),
            scales if linear.scale is None else linear.scale,
            h,
            *aligned,
            scales.stride(1),
            max_tiles,
            k,
            size,
            in_size,
            ROWS=rows,
            OUTPUTS=tile.outputs,
            DEPTH=tile.depth,
            KIND=linear.kind,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            launch_pdl=True,
        )
        return h

    def down(
        self, h: torch.Tensor | Quantized, linear: ExpertLinear, aligned: Alignment, rows: int, tile: Tile
    ) -> torch.Tensor:
        """Returns the products of h's rows, (num_pairs, hidden_size) bfloat16, in the order of tokens."""
        _, out_size, size = linear.weight.shape
        numbers, scales, _ = h if isinstance(h, Quantized) else (h, h, len(h))
        max_tiles = aligned.tiles.shape[1]
        y = torch.empty(len(aligned.pairs), out_size, dtype=torch.bfloat16, device=numbers.device)
        launch: Any = down_kernel[(max_tiles, triton.cdiv(out_size, tile.outputs))]
        launch(
            TensorDescriptor.from_tensor(numbers, [rows, tile.depth]),
            scales,
            TensorDescriptor.from_tensor(linear.weight, [1, tile.outputs, tile.depth]),
            scales if linear.scale is None else linear.scale,
            y,
            *aligned,
            len(numbers),
            max_tiles,
            out_size,
            size,
            ROWS=rows,
            OUTPUTS=tile.outputs,
            DEPTH=tile.depth,
            KIND=linear.kind,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            launch_pdl=True,
        )
        return y

    def combine(
        self,
        y: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        residual: torch.Tensor,
        num_experts: int,
        first_expert: int = 0,
    ) -> torch.Tensor:
        num_tokens, out_size = residual.shape
        launch: Any = combine_kernel[(num_tokens, triton.cdiv(out_size, COMBINED))]
        launch(
            y,
            weights,
            experts,
            residual,
            out_size,
            num_experts,
            first_expert,
            K=experts.shape[1],
            BLOCK=COMBINED,
            num_warps=4,
            launch_pdl=True,
        )
        return residual


def quantized(x: torch.Tensor | Quantized, linear: ExpertLinear) -> torch.Tensor | Quantized:
    """Returns x as inputs of `linear`: x itself for bfloat16 weights, or if it is quantized."""
    if isinstance(x, Quantized) or linear.inputs is None:
        return x
    return quantize_rows(x, linear.inputs, linear.input_scale)
