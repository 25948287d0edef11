"""Draws of drafts from logits by several blocks a row, in a CUDA graph. Needs CUDA.

The rules are those of tandem.engine.sampler for rows without penalties, bias and masks. Masses are the same integers,
so tokens are the same too, and sums do not depend on the order of addition.

A row is cut into parts. One kernel finds the largest logit of each part. With filters, a kernel for each digit of two
searches finds the least logit that top-k keeps, then top-p; it skips parts whose logits are all smaller. Then one
kernel finds the kept mass of each part, and the last one the part and the token.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from tandem.engine.draws import MASS_BITS

# Searches find a key of 16 bits by digits, each from the sums at all of its values.
BITS, VALUES, DIGITS = tl.constexpr(4), tl.constexpr(16), tl.constexpr(4)
# Of a mass.
MOST = tl.constexpr(2.0**MASS_BITS)


def part_size(num_logits: int) -> int:
    """Returns a number of tokens: few logits need many blocks, and larger parts cost less for each logit."""
    return 1024 if num_logits <= 2**19 else 2048


def draw_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    u: torch.Tensor,
    number: torch.Tensor,
    out: torch.Tensor,
    drawn: torch.Tensor,
    has_filters: bool,
) -> None:
    """Draws each row's next token.

    Args:
        logits: (num_rows, vocab_size) bfloat16, contiguous.
        temperature, top_p, min_p: (num_rows,) float64; temperature 0: the most likely token, the lowest of equals.
        top_k: (num_rows,) int64; 0 or -1: all.
        u: (num_passes, num_rows or more) float64, random numbers in [0, 1).
        number: (1,) int64, the row of `u` and `drawn`.
        out: (num_rows,) int64, overwritten.
        drawn: (num_passes, num_rows or more) int64; a row is overwritten likewise.
        has_filters: whether a row's top_k or top_p may drop tokens.
    """
    num_rows, vocab_size = logits.shape
    assert logits.is_contiguous() and logits.dtype is torch.bfloat16 and u.stride(0) == drawn.stride(0)
    size = part_size(logits.numel())
    num_parts = triton.cdiv(vocab_size, size)
    largest = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    # Of each digit of both searches.
    sums = torch.empty(num_rows, 2 * DIGITS.value, VALUES.value, dtype=torch.int64, device=logits.device)
    kept = torch.empty(num_rows, num_parts, 2, dtype=torch.int64, device=logits.device)
    filters = (temperature, top_k, top_p, min_p)
    sizes = {"VOCAB": vocab_size, "PART": size, "MAX_PARTS": triton.next_power_of_2(num_parts)}
    grid = (num_parts, num_rows)
    _largest_of_parts[grid](logits, largest, sums, VOCAB=vocab_size, PART=size, num_warps=4)
    for digit in range(2 * DIGITS.value if has_filters else 0):
        _add_sums[grid](logits, *filters, largest, sums, digit, IS_OF_K=digit < DIGITS.value, **sizes, num_warps=4)
    sizes |= {"HAS_FILTERS": has_filters, "num_warps": 4}
    _kept_of_parts[grid](logits, *filters, largest, sums, kept, **sizes)
    _draw[(num_rows,)](logits, *filters, u, number, largest, sums, kept, out, drawn, u.stride(0), **sizes)


@triton.jit
def _largest_of_parts(logits, largest, sums, VOCAB: tl.constexpr, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program: a part of a row. Also clears the row's sums."""
    part, row = tl.program_id(0), tl.program_id(1)
    _, x = _load(logits, row, part, VOCAB, PART)
    # A maximum ignores NaN.
    tl.store(largest + row * tl.num_programs(0) + part, tl.max(x, 0))
    if part == 0:
        i = tl.arange(0, 2 * DIGITS * VALUES)
        tl.store(sums + row * 2 * DIGITS * VALUES + i, tl.zeros_like(i).to(tl.int64))


@triton.jit(do_not_specialize=["digit"])
def _add_sums(  # type: ignore[no-untyped-def]
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    largest,
    sums,
    digit,
    IS_OF_K: tl.constexpr,
    VOCAB: tl.constexpr,
    PART: tl.constexpr,
    MAX_PARTS: tl.constexpr,
):
    """Adds tokens (of top-k's digits) or masses (of top-p's) with keys from each value of the digit on.

    Program: a part of a row.
    """
    part, row = tl.program_id(0), tl.program_id(1)
    top_k = tl.load(top_ks + row)
    is_needed = (top_k > 0) & (top_k < VOCAB) if IS_OF_K else tl.load(top_ps + row) < 1
    if is_needed & (tl.load(temperatures + row) > 0):
        least, _ = _least(sums, top_ks, top_ps, row, digit)
        if _keys(tl.load(largest + row * tl.num_programs(0) + part)) >= least:
            exists, x = _load(logits, row, part, VOCAB, PART)
            if IS_OF_K:
                amount = exists.to(tl.int32)
            else:
                most = _most(largest, row, tl.num_programs(0), MAX_PARTS)
                amount = _masses(x, most, temperatures, min_ps, row)
            value = tl.arange(0, VALUES)
            key = least + (value << BITS * (DIGITS - 1 - digit % DIGITS))
            added = tl.sum(tl.where(_keys(x)[None, :] >= key[:, None], amount[None, :], 0), 1)
            # Integers, so the order does not matter.
            tl.atomic_add(sums + (row * 2 * DIGITS + digit) * VALUES + value, added.to(tl.int64), sem="relaxed")


@triton.jit
def _kept_of_parts(  # type: ignore[no-untyped-def]
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    largest,
    sums,
    kept,
    VOCAB: tl.constexpr,
    PART: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
):
    """Stores the mass above the least key, and the number of tokens with it. Program: a part of a row."""
    part, row = tl.program_id(0), tl.program_id(1)
    if tl.load(temperatures + row) > 0:
        exists, x = _load(logits, row, part, VOCAB, PART)
        least = 0
        if HAS_FILTERS:
            least, _ = _least(sums, top_ks, top_ps, row, 2 * DIGITS)
        most = _most(largest, row, tl.num_programs(0), MAX_PARTS)
        key = _keys(x)
        mass = tl.where(key > least, _masses(x, most, temperatures, min_ps, row), 0)
        at = kept + 2 * (row * tl.num_programs(0) + part)
        tl.store(at, tl.sum(mass, 0))
        tl.store(at + 1, tl.sum((exists & (key == least)).to(tl.int64), 0))


@triton.jit
def _draw(  # type: ignore[no-untyped-def]
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    u,
    number,
    largest,
    sums,
    kept,
    out,
    drawn,
    pass_stride,
    VOCAB: tl.constexpr,
    PART: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
):
    """Program: a row."""
    row = tl.program_id(0)
    num_parts = (VOCAB + PART - 1) // PART
    at = tl.load(number) * pass_stride + row
    parts, i = tl.arange(0, MAX_PARTS), tl.arange(0, PART)
    has_part = parts < num_parts
    tops = tl.load(largest + row * num_parts + parts, mask=has_part, other=float("-inf"))
    most = tl.max(tops, 0)
    if tl.load(temperatures + row) > 0:
        above = tl.load(kept + 2 * (row * num_parts + parts), mask=has_part, other=0)
        num_least = tl.load(kept + 2 * (row * num_parts + parts) + 1, mask=has_part, other=0)
        least, num_kept = 0, tl.full([], VOCAB, tl.int64)
        if HAS_FILTERS:
            least, limit = _least(sums, top_ks, top_ps, row, 2 * DIGITS)
        of_least = _masses(_values(least), most, temperatures, min_ps, row)
        if HAS_FILTERS:
            # Of the tokens with the least key, top-p keeps the first ones.
            each = tl.maximum(of_least, 1)
            num_kept = tl.where(tl.load(top_ps + row) < 1, (limit - tl.sum(above, 0) + each - 1) // each, num_kept)
        num_before = tl.cumsum(num_least, 0) - num_least
        mass = above + of_least * tl.minimum(tl.maximum(num_kept - num_before, 0), num_least)
        total = tl.sum(mass, 0)
        # A float64 may exceed the sum that it rounds.
        threshold = tl.minimum((tl.load(u + at) * total.to(tl.float64)).to(tl.int64), total - 1)
        part = tl.min(tl.where(tl.cumsum(mass, 0) > threshold, parts, num_parts - 1), 0)
        threshold -= tl.sum(tl.where(parts < part, mass, 0), 0)
        num_kept -= tl.sum(tl.where(parts < part, num_least, 0), 0)
        _, x = _load(logits, row, part, VOCAB, PART)
        key = _keys(x)
        is_least = key == least
        is_kept = (key > least) | (is_least & (tl.cumsum(is_least.to(tl.int32), 0) <= num_kept))
        mass = tl.where(is_kept, _masses(x, most, temperatures, min_ps, row), 0)
        is_next = tl.cumsum(mass, 0) > threshold
    else:
        part = tl.min(tl.where(tops == most, parts, num_parts - 1), 0)
        _, x = _load(logits, row, part, VOCAB, PART)
        is_next = x == most
    # Without finite logits, any token will do.
    token = tl.minimum(part * PART + tl.min(tl.where(is_next, i, PART - 1), 0), VOCAB - 1)
    tl.store(out + row, token.to(tl.int64))
    tl.store(drawn + at, token.to(tl.int64))


@triton.jit
def _load(logits, row, part, VOCAB: tl.constexpr, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns whether there is a token, and its logit in float32."""
    i = part * PART + tl.arange(0, PART)
    exists = i < VOCAB
    return exists, tl.load(logits + row.to(tl.int64) * VOCAB + i, mask=exists, other=float("-inf")).to(tl.float32)


@triton.jit
def _most(largest, row, num_parts, MAX_PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    parts = tl.arange(0, MAX_PARTS)
    return tl.max(tl.load(largest + row * num_parts + parts, mask=parts < num_parts, other=float("-inf")), 0)


@triton.jit
def _least(sums, top_ks, top_ps, row, num_digits):  # type: ignore[no-untyped-def]
    """Returns the least key that is kept by the first digits, and the mass that top-p keeps of top-k's.

    Sums of digits that the row does not need are 0.
    """
    digit, value = tl.arange(0, 2 * DIGITS), tl.arange(0, VALUES)
    at = sums + ((row * 2 * DIGITS + digit) * VALUES)[:, None] + value[None, :]
    # Other blocks are adding to the next digit's.
    amounts = tl.load(at, mask=(digit < num_digits)[:, None], other=0)
    is_total = (digit == DIGITS)[:, None] & (value == 0)[None, :]
    total = tl.sum(tl.sum(tl.where(is_total, amounts, 0), 1), 0)
    exact = tl.load(top_ps + row) * total.to(tl.float64)
    limit = exact.to(tl.int64)
    limit += (limit.to(tl.float64) < exact).to(tl.int64)
    limit = tl.maximum(tl.minimum(limit, total), 1)
    wanted = tl.where(digit < DIGITS, tl.maximum(tl.load(top_ks + row), 1), limit)
    values = tl.sum(((amounts >= wanted[:, None]) & (value > 0)[None, :]).to(tl.int32), 1)
    return tl.sum(values << (BITS * (DIGITS - 1 - digit % DIGITS)), 0), limit


@triton.jit
def _keys(x):  # type: ignore[no-untyped-def]
    """Maps bfloat16 values in float32 to int32 numbers of the same order, from 0 to 65,535. Both zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True) >> 16
    return tl.where(bits < 0, -1 - bits, bits + 32768)


@triton.jit
def _values(key):  # type: ignore[no-untyped-def]
    return (tl.where(key < 32768, -1 - key, key - 32768) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _masses(x, most, temperatures, min_ps, row):  # type: ignore[no-untyped-def]
    # As torch computes them; 0 for NaN.
    x = tl.div_rn(x - most, tl.load(temperatures + row).to(tl.float32))
    least_log = libdevice.log(tl.load(min_ps + row).to(tl.float32))
    return tl.where(x >= least_log, libdevice.exp(x) * MOST, 0.0).to(tl.int64)
