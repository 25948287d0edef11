"""Triton kernels of GroupedExperts. Needs CUDA.

A product multiplies a tile of weights, as the left operand, by up to ROWS rows of inputs. The instruction needs 64
rows on the left but only 8 on the right, so an expert with few rows wastes little.

Blocks of one expert and the same outputs are neighbors, so that the L2 cache serves all but the first.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.engine.models.quantization import BLOCK as _BLOCK

GROUP = tl.constexpr(_BLOCK)


@triton.jit(do_not_specialize=["scales_stride", "max_tiles"])
def gate_up_kernel(  # type: ignore[no-untyped-def]
    x,
    x_scales,
    weight,
    weight_scales,
    h,
    pairs,
    tiles,
    num_tiles,
    scales_stride,
    max_tiles,
    k,
    size,
    in_size,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
):
    """Writes silu(gate) * up of each pair at its place: h, (num_pairs, size).

    Args:
        x: (num_tokens, in_size); a token's scales are scales_stride apart.
        weight: descriptor of (2 * num_experts, size, in_size), gate and up in turn.
    """
    gdc_launch_dependents()
    gdc_wait()
    tile = tl.program_id(0)
    first_output = tl.program_id(1) * OUTPUTS
    if tile < tl.load(num_tiles):
        expert = tl.load(tiles + tile)
        places = tl.load(tiles + max_tiles + tile) + tl.arange(0, ROWS)
        has_pair = places < tl.load(tiles + 2 * max_tiles + tile)
        tokens = tl.load(pairs + places, mask=has_pair, other=0) // k
        inputs = tl.arange(0, DEPTH)
        rows = x + tokens[:, None].to(tl.int64) * in_size + inputs[None, :]
        num_groups = in_size // GROUP
        of_gate = weight_scales + (2 * expert * (size // GROUP) + first_output // GROUP) * num_groups
        of_up = of_gate + size // GROUP * num_groups
        gate = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
        up = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
        for step in range(tl.cdiv(in_size, DEPTH)):
            w_gate = weight.load([2 * expert, first_output, step * DEPTH]).reshape(OUTPUTS, DEPTH)
            w_up = weight.load([2 * expert + 1, first_output, step * DEPTH]).reshape(OUTPUTS, DEPTH)
            mask = has_pair[:, None] & (step * DEPTH + inputs < in_size)[None, :]
            a = tl.load(rows + step * DEPTH, mask=mask, other=0.0)
            if KIND == "block":
                a_scales = tl.load(x_scales + step * scales_stride + tokens, mask=has_pair, other=0.0)
                gate += tl.dot(w_gate, a.T) * (a_scales * tl.load(of_gate + step))[None, :]
                up += tl.dot(w_up, a.T) * (a_scales * tl.load(of_up + step))[None, :]
            else:
                gate = tl.dot(w_gate, a.T, gate)
                up = tl.dot(w_up, a.T, up)
        outputs = first_output + tl.arange(0, OUTPUTS)
        exists = outputs < size
        if KIND == "channel":
            a_scales = tl.load(x_scales + tokens, mask=has_pair, other=0.0)[None, :]
            gate_scales = weight_scales + 2 * expert * size + outputs
            gate *= a_scales * tl.load(gate_scales, mask=exists, other=0.0)[:, None]
            up *= a_scales * tl.load(gate_scales + size, mask=exists, other=0.0)[:, None]
        gated = gate / (1 + tl.exp(-gate)) * up
        to = h + places[None, :].to(tl.int64) * size + outputs[:, None]
        tl.store(to, gated.to(h.dtype.element_ty), mask=has_pair[None, :] & exists[:, None])


@triton.jit(do_not_specialize=["num_rows", "max_tiles"])
def down_kernel(  # type: ignore[no-untyped-def]
    h,
    h_scales,
    weight,
    weight_scales,
    y,
    pairs,
    tiles,
    num_tiles,
    num_rows,
    max_tiles,
    out_size,
    size,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
):
    """Writes y, (num_pairs, out_size), by pair.

    Args:
        h: descriptor of (num_pairs, size), by place; a group's scales are num_rows apart.
        weight: descriptor of (num_experts, out_size, size).
    """
    gdc_launch_dependents()
    gdc_wait()
    tile = tl.program_id(0)
    first_output = tl.program_id(1) * OUTPUTS
    if tile < tl.load(num_tiles):
        expert = tl.load(tiles + tile)
        first = tl.load(tiles + max_tiles + tile)
        places = first + tl.arange(0, ROWS)
        has_pair = places < tl.load(tiles + 2 * max_tiles + tile)
        of_block = weight_scales + (expert * (out_size // GROUP) + first_output // GROUP) * (size // GROUP)
        sums = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
        for step in range(tl.cdiv(size, DEPTH)):
            w = weight.load([expert, first_output, step * DEPTH]).reshape(OUTPUTS, DEPTH)
            # Rows of the next expert may follow: they are multiplied and left.
            a = h.load([first, step * DEPTH])
            if KIND == "block":
                a_scales = tl.load(h_scales + step * num_rows + places, mask=has_pair, other=0.0)
                sums += tl.dot(w, a.T) * (a_scales * tl.load(of_block + step))[None, :]
            else:
                sums = tl.dot(w, a.T, sums)
        outputs = first_output + tl.arange(0, OUTPUTS)
        exists = outputs < out_size
        if KIND == "channel":
            sums *= tl.load(h_scales + places, mask=has_pair, other=0.0)[None, :]
            sums *= tl.load(weight_scales + expert * out_size + outputs, mask=exists, other=0.0)[:, None]
        of_tile = tl.load(pairs + places, mask=has_pair, other=0)
        to = y + of_tile[None, :].to(tl.int64) * out_size + outputs[:, None]
        tl.store(to, sums.to(y.dtype.element_ty), mask=has_pair[None, :] & exists[:, None])


@triton.jit(do_not_specialize=["first_expert"])
def combine_kernel(  # type: ignore[no-untyped-def]
    y,
    weights,
    experts,
    residual,
    size,
    num_experts,
    first_expert,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the weighted sum of a token's pairs to its residual, in float32 and in the order of its experts."""
    token = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = outputs < size
    gdc_launch_dependents()
    gdc_wait()
    to = residual + token * size + outputs
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(K):
        pair = token * K + j
        expert = tl.load(experts + pair) - first_expert
        is_local = (expert >= 0) & (expert < num_experts)
        of_pair = tl.load(y + pair * size + outputs, mask=exists & is_local, other=0.0).to(tl.float32)
        sums += tl.load(weights + pair) * of_pair
    sums += tl.load(to, mask=exists, other=0.0).to(tl.float32)
    tl.store(to, sums.to(residual.dtype.element_ty), mask=exists)
