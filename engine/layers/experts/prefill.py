"""Experts of many tokens. Needs CUDA."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.engine.layers.cuda_kernel import has_dependent_launch
from tandem.engine.layers.experts.expert_products import TILE_ROWS, ExpertProducts
from tandem.engine.layers.experts.grouped import quantized
from tandem.engine.layers.experts.linear import ExpertLinear
from tandem.engine.layers.experts.permutation import MAX_EXPERTS, Permutation, Permuter
from tandem.engine.layers.fp8 import FP8_DTYPE
from tandem.engine.layers.fp8_quantize import FP8_MAX, SMALLEST_AMAX, Quantized
from tandem.engine.models.quantization import BLOCK

# The products use instructions of this compute capability.
CAPABILITY = (9, 0)
# Sizes are multiples of these: of groups of weight rows, and of 16-byte copies.
HIDDEN_MULTIPLE, EXPERT_MULTIPLE = 64, 32
MAX_K = 16
# Places that a block quantizes, one per warp, and the most numbers of a warp's step.
QUANTIZED_ROWS = 4
MAX_QUANTIZED_STEP = 1024
# Numbers of a token that a block adds up.
COMBINE_BLOCK = 2048


class PrefillExperts:
    """Sorts pairs (token, expert) by expert, multiplies each expert's rows, and adds up each token's results.

    Results depend neither on the other tokens nor on the order of blocks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_supported = torch.cuda.get_device_capability(device) == CAPABILITY
        self._products = ExpertProducts(device)
        self._permuters: dict[int, Permuter] = {}

    def fits(self, x: torch.Tensor, num_chosen: int, gate_up: ExpertLinear, down: ExpertLinear) -> bool:
        num_experts, hidden_size, expert_size = down.weight.shape
        if not self._is_supported or x.dtype is not torch.bfloat16 or gate_up.kind != down.kind:
            return False
        if num_experts > MAX_EXPERTS or num_chosen > MAX_K:
            return False
        multiples = (BLOCK, BLOCK) if down.is_block else (HIDDEN_MULTIPLE, EXPERT_MULTIPLE)
        return hidden_size % multiples[0] == 0 and expert_size % multiples[1] == 0

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
        """Adds sum over j of weights[:, j] * down(silu(gate(xn)) * up(xn)) by expert experts[:, j] to `residual`.

        The sum is in float32 and in the order of j.

        Args:
            xn: (num_tokens, hidden_size) bfloat16, normalized, contiguous, or quantized as gate_up's inputs.
            weights: (num_tokens, k) float32.
            experts: (num_tokens, k) int32.
            residual: (num_tokens, hidden_size) bfloat16; overwritten.
            first_expert: first of this device's experts; others add nothing.
        """
        permutation = self._permuter(down.num_experts).permute(experts, TILE_ROWS, first_expert)
        gated = self._products.gate_up(quantized(xn, gate_up), gate_up, down, permutation)
        if down.kind != "plain" and isinstance(gated, torch.Tensor):
            gated = quantize_places(gated, permutation)
        return combine(self._products.down(gated, down, permutation), weights, permutation.places, residual)

    def _permuter(self, num_experts: int) -> Permuter:
        if num_experts not in self._permuters:
            self._permuters[num_experts] = Permuter(num_experts, self._device)
        return self._permuters[num_experts]


def quantize_places(x: torch.Tensor, permutation: Permutation) -> Quantized:
    """Quantizes (num_places, size) bfloat16 with a scale per place, and leaves out places that do not exist."""
    num_places, size = x.shape
    numbers = torch.empty(num_places, size, dtype=FP8_DTYPE, device=x.device)
    scales = torch.empty(num_places, 1, device=x.device)
    is_dependent = has_dependent_launch(x.device)
    launch: Any = _quantize_places[(triton.cdiv(num_places, QUANTIZED_ROWS),)]
    launch(
        x,
        permutation.offsets[-1:],
        numbers,
        scales,
        SIZE=size,
        STEP=min(MAX_QUANTIZED_STEP, size & -size),
        ROWS=QUANTIZED_ROWS,
        DEPENDENT=is_dependent,
        num_warps=4,
        launch_pdl=is_dependent,
    )
    return Quantized(numbers, scales, num_places)


def combine(y: torch.Tensor, weights: torch.Tensor, places: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """Adds sum over j of weights[:, j] * y[places[:, j]] to `residual`, in float32 and in the order of j.

    Args:
        y: (num_places, size) bfloat16.
        weights: (num_tokens, k) float32.
        places: (num_tokens, k) int32; negative ones add nothing.
        residual: (num_tokens, size) bfloat16.
    """
    num_tokens, size = residual.shape
    assert y.is_contiguous() and weights.is_contiguous() and residual.is_contiguous()
    is_dependent = has_dependent_launch(residual.device)
    launch: Any = _combine[(num_tokens, triton.cdiv(size, COMBINE_BLOCK))]
    launch(
        y,
        weights,
        places,
        residual,
        SIZE=size,
        BLOCK_SIZE=COMBINE_BLOCK,
        K=weights.shape[1],
        DEPENDENT=is_dependent,
        num_warps=4,
        launch_pdl=is_dependent,
    )
    return residual


@triton.jit
def _quantize_places(  # type: ignore[no-untyped-def]
    x,
    num_existing,
    numbers,
    scales,
    SIZE: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    places = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = places[:, None] * SIZE + tl.arange(0, STEP)[None, :]
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    has_place = places < tl.load(num_existing)
    exists = has_place[:, None]
    largest = tl.zeros((ROWS,), dtype=tl.float32)
    for first in tl.static_range(0, SIZE, STEP):
        a = tl.load(x + at + first, mask=exists, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(a), 1))
    scale = tl.maximum(largest, SMALLEST_AMAX) / FP8_MAX
    tl.store(scales + places, scale, mask=has_place)
    # Again, from the L1 cache.
    for first in tl.static_range(0, SIZE, STEP):
        a = tl.load(x + at + first, mask=exists, other=0.0).to(tl.float32)
        a = tl.minimum(tl.maximum(a / scale[:, None], -FP8_MAX), FP8_MAX)
        tl.store(numbers + at + first, a.to(numbers.dtype.element_ty), mask=exists)


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    y,
    weights,
    places,
    residual,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    exists = i < SIZE
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros((BLOCK_SIZE,), dtype=tl.float32)
    for j in tl.static_range(K):
        place = tl.load(places + token * K + j)
        weight = tl.load(weights + token * K + j)
        row = tl.load(y + place.to(tl.int64) * SIZE + i, mask=exists & (place >= 0), other=0.0)
        sums += weight * row.to(tl.float32)
    sums += tl.load(residual + token * SIZE + i, mask=exists, other=0.0).to(tl.float32)
    tl.store(residual + token * SIZE + i, sums.to(residual.dtype.element_ty), mask=exists)
