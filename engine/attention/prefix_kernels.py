"""Triton kernels around attention to the parts of prefixes."""

import torch
import triton
import triton.language as tl

from tandem.engine.attention.prefix_parts import ENTRY_SIZE, MAX_PARTS


def copy_queries(q: torch.Tensor, table: torch.Tensor, part_q: torch.Tensor, num_kv_heads: int) -> None:
    """Copies each token's queries to its row of every part.

    Args:
        q: (num_tokens, num_q_heads, head_dim), contiguous.
        table: (num_tokens * ENTRY_SIZE,) int32, of PrefixParts.
        part_q: (num_rows * group, num_kv_heads, head_dim), contiguous, with group = num_q_heads // num_kv_heads. Row
            r's heads of one key head are in r * group and behind.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    _copy_queries[(num_tokens,)](q, table, part_q, **_constants(num_q_heads, num_kv_heads, head_dim))


def merge_parts(
    out: torch.Tensor,
    log_sums: torch.Tensor,
    table: torch.Tensor,
    part_out: torch.Tensor,
    part_log_sums: torch.Tensor,
    num_kv_heads: int,
) -> None:
    """Adds the parts to the attention of tokens that have some, in the parts' order and float32.

    Args:
        out: (num_tokens, num_q_heads, head_dim), contiguous: attention to the other tokens; overwritten.
        log_sums: (num_tokens, num_q_heads) float32: its log-sum-exp, in units of log 2.
        table: as of copy_queries.
        part_out: in the order of part_q.
        part_log_sums: (num_rows * group, num_kv_heads) float32.
    """
    num_tokens, num_q_heads, head_dim = out.shape
    constants = _constants(num_q_heads, num_kv_heads, head_dim)
    _merge_parts[(num_tokens,)](out, log_sums, table, part_out, part_log_sums, **constants)


def _constants(num_q_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, int]:
    """Most tokens have no parts, so a program has all heads of one."""
    heads_block = triton.next_power_of_2(num_q_heads)
    return {
        "HEADS": num_q_heads,
        "HEADS_BLOCK": heads_block,
        "NUM_KV": num_kv_heads,
        "GROUP": num_q_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "ENTRY": ENTRY_SIZE,
        "PARTS": MAX_PARTS,
        "num_warps": min(8, max(1, heads_block * head_dim // 1024)),
    }


@triton.jit
def _copy_queries(  # type: ignore[no-untyped-def]
    q,
    table,
    part_q,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ENTRY: tl.constexpr,
    PARTS: tl.constexpr,
):
    token = tl.program_id(0)
    num_parts = tl.load(table + token * ENTRY + 2)
    if num_parts > 0:
        row = tl.load(table + token * ENTRY)
        stride = tl.load(table + token * ENTRY + 1)
        head = tl.arange(0, HEADS_BLOCK)[:, None]  # (HEADS_BLOCK, 1)
        d = tl.arange(0, HEAD_DIM)[None, :]  # (1, HEAD_DIM)
        exists = head < HEADS
        numbers = tl.load(q + (token * HEADS + head) * HEAD_DIM + d, mask=exists)
        for part in tl.static_range(PARTS):
            place = ((row + part * stride) * GROUP + head % GROUP) * NUM_KV + head // GROUP
            tl.store(part_q + place * HEAD_DIM + d, numbers, mask=exists & (part < num_parts))


@triton.jit
def _merge_parts(  # type: ignore[no-untyped-def]
    out,
    log_sums,
    table,
    part_out,
    part_log_sums,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ENTRY: tl.constexpr,
    PARTS: tl.constexpr,
):
    token = tl.program_id(0)
    num_parts = tl.load(table + token * ENTRY + 2)
    if num_parts > 0:
        row = tl.load(table + token * ENTRY)
        stride = tl.load(table + token * ENTRY + 1)
        head = tl.arange(0, HEADS_BLOCK)  # (HEADS_BLOCK,)
        d = tl.arange(0, HEAD_DIM)[None, :]  # (1, HEAD_DIM)
        exists = head < HEADS
        place = (row * GROUP + head % GROUP) * NUM_KV + head // GROUP
        step = stride * GROUP * NUM_KV
        own_sum = tl.load(log_sums + token * HEADS + head, mask=exists, other=0.0)
        largest = own_sum
        # Loops of fixed length, whose loads are all under way at once.
        for part in tl.static_range(PARTS):
            is_part = exists & (part < num_parts)
            log_sum = tl.load(part_log_sums + place + part * step, mask=is_part, other=float("-inf"))
            largest = tl.maximum(largest, log_sum)
        total = tl.exp2(own_sum - largest)
        own = (token * HEADS + head)[:, None] * HEAD_DIM + d
        merged = tl.load(out + own, mask=exists[:, None], other=0.0).to(tl.float32) * total[:, None]
        for part in tl.static_range(PARTS):
            is_part = exists & (part < num_parts)
            log_sum = tl.load(part_log_sums + place + part * step, mask=is_part, other=float("-inf"))
            weight = tl.exp2(log_sum - largest)
            of_part = (place + part * step)[:, None] * HEAD_DIM + d
            numbers = tl.load(part_out + of_part, mask=is_part[:, None], other=0.0)
            merged += numbers.to(tl.float32) * weight[:, None]
            total += weight
        tl.store(out + own, (merged / total[:, None]).to(out.dtype.element_ty), mask=exists[:, None])
