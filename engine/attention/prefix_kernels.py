"""Triton kernels around attention to the parts of prefixes."""

import torch
import triton
import triton.language as tl

from tandem.engine.attention.prefix_parts import ENTRY_SIZE


def copy_queries(q: torch.Tensor, table: torch.Tensor, part_q: torch.Tensor, num_kv_heads: int) -> None:
    """Copies each token's queries to its row of every part.

    Args:
        q: (num_tokens, num_q_heads, head_dim), contiguous.
        table: (num_tokens * ENTRY_SIZE,) int32, of PrefixParts.
        part_q: (num_rows * group, num_kv_heads, head_dim), contiguous, with group = num_q_heads // num_kv_heads. Row
            r's heads of one key head are in r * group and behind.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    group = num_q_heads // num_kv_heads
    _copy_queries[(num_tokens, num_kv_heads)](
        q,
        table,
        part_q,
        NUM_KV=num_kv_heads,
        GROUP=group,
        GROUP_BLOCK=triton.next_power_of_2(group),
        HEAD_DIM=head_dim,
        ENTRY=ENTRY_SIZE,
        num_warps=1,
    )


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
    group = num_q_heads // num_kv_heads
    _merge_parts[(num_tokens, num_kv_heads)](
        out,
        log_sums,
        table,
        part_out,
        part_log_sums,
        NUM_KV=num_kv_heads,
        GROUP=group,
        GROUP_BLOCK=triton.next_power_of_2(group),
        HEAD_DIM=head_dim,
        ENTRY=ENTRY_SIZE,
        num_warps=1,
    )


@triton.jit
def _copy_queries(  # type: ignore[no-untyped-def]
    q,
    table,
    part_q,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ENTRY: tl.constexpr,
):
    token, kv_head = tl.program_id(0), tl.program_id(1)
    num_parts = tl.load(table + token * ENTRY + 2)
    if num_parts > 0:
        row = tl.load(table + token * ENTRY)
        stride = tl.load(table + token * ENTRY + 1)
        g = tl.arange(0, GROUP_BLOCK)[:, None]  # (GROUP_BLOCK, 1)
        d = tl.arange(0, HEAD_DIM)[None, :]  # (1, HEAD_DIM)
        exists = g < GROUP
        head = (token * NUM_KV + kv_head) * GROUP + g
        numbers = tl.load(q + head * HEAD_DIM + d, mask=exists)
        for part in range(num_parts):
            place = ((row + part * stride) * GROUP + g) * NUM_KV + kv_head
            tl.store(part_q + place * HEAD_DIM + d, numbers, mask=exists)


@triton.jit
def _merge_parts(  # type: ignore[no-untyped-def]
    out,
    log_sums,
    table,
    part_out,
    part_log_sums,
    NUM_KV: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ENTRY: tl.constexpr,
):
    token, kv_head = tl.program_id(0), tl.program_id(1)
    num_parts = tl.load(table + token * ENTRY + 2)
    if num_parts > 0:
        row = tl.load(table + token * ENTRY)
        stride = tl.load(table + token * ENTRY + 1)
        g = tl.arange(0, GROUP_BLOCK)[:, None]  # (GROUP_BLOCK, 1)
        d = tl.arange(0, HEAD_DIM)[None, :]  # (1, HEAD_DIM)
        exists = g < GROUP
        head = (token * NUM_KV + kv_head) * GROUP + g
        largest = tl.load(log_sums + head, mask=exists, other=0.0)  # (GROUP_BLOCK, 1)
        merged = tl.load(out + head * HEAD_DIM + d, mask=exists, other=0.0).to(tl.float32)
        total = tl.full((GROUP_BLOCK, 1), 1.0, tl.float32)
        for part in range(num_parts):
            place = ((row + part * stride) * GROUP + g) * NUM_KV + kv_head
            log_sum = tl.load(part_log_sums + place, mask=exists, other=0.0)
            numbers = tl.load(part_out + place * HEAD_DIM + d, mask=exists, other=0.0).to(tl.float32)
            larger = tl.maximum(largest, log_sum)
            kept, added = tl.exp2(largest - larger), tl.exp2(log_sum - larger)
            merged = merged * kept + numbers * added
            total = total * kept + added
            largest = larger
        tl.store(out + head * HEAD_DIM + d, (merged / total).to(out.dtype.element_ty), mask=exists)
