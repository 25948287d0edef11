"""Draws of drafts from logits by one kernel, in a CUDA graph. Needs CUDA.

The rules are those of tandem.engine.sampler for rows without penalties, bias and masks. Masses are the same integers,
so tokens are the same too.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from tandem.engine.draws import MASS_BITS

# Tokens at a time: of the search for the largest logit, and of sums, which need more registers.
WIDE, CHUNK = 8192, 4096


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
) -> None:
    """Draws each row's next token.

    Args:
        logits: (num_rows, vocab_size) bfloat16, contiguous.
        temperature, top_p, min_p: (num_rows,) float64; temperature 0: the most likely token, the lowest of equals.
        top_k: (num_rows,) int64; 0: all.
        u: (num_passes, num_rows or more) float64, random numbers in [0, 1).
        number: (1,) int64, the row of `u` and `drawn`.
        out: (num_rows,) int64, overwritten.
        drawn: (num_passes, num_rows or more) int64; a row is overwritten likewise.
    """
    num_rows, vocab_size = logits.shape
    assert logits.is_contiguous() and logits.dtype is torch.bfloat16 and u.stride(0) == drawn.stride(0)
    least = triton.next_power_of_2(vocab_size)
    _draw_tokens[(num_rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        u,
        number,
        out,
        drawn,
        u.stride(0),
        VOCAB=vocab_size,
        WIDE=min(WIDE, least),
        CHUNK=min(CHUNK, least),
        MOST=2.0**MASS_BITS,
        num_warps=16,
    )


@triton.jit
def _draw_tokens(  # type: ignore[no-untyped-def]
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    u,
    number,
    out,
    drawn,
    pass_stride,
    VOCAB: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST: tl.constexpr,
):
    """Program: a row."""
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * VOCAB
    w = tl.arange(0, WIDE)
    top = tl.full([WIDE], float("-inf"), tl.float32)
    place = tl.zeros([WIDE], tl.int32)
    for first in range(0, VOCAB, WIDE):
        x = tl.load(base + first + w, mask=first + w < VOCAB, other=float("-inf")).to(tl.float32)
        is_better = x > top
        top = tl.where(is_better, x, top)
        place = tl.where(is_better, first + w, place)
    largest = tl.max(top, 0)
    token = tl.min(tl.where(top == largest, place, VOCAB - 1), 0)
    temperature = tl.load(temperatures + row).to(tl.float32)
    at = tl.load(number) * pass_stride + row
    if temperature > 0:
        i = tl.arange(0, CHUNK)
        top_k = tl.load(top_ks + row)
        top_p = tl.load(top_ps + row)
        least_log = libdevice.log(tl.load(min_ps + row).to(tl.float32))
        # Tokens with smaller keys are dropped. Both searches find two of its bits at a time.
        least = tl.zeros([], tl.int32)
        if top_k > 0 and top_k < VOCAB:
            for digit in range(8):
                step = 1 << (14 - 2 * digit)
                n1 = tl.zeros([CHUNK], tl.int32)
                n2 = tl.zeros([CHUNK], tl.int32)
                n3 = tl.zeros([CHUNK], tl.int32)
                for first in range(0, VOCAB, CHUNK):
                    exists = first + i < VOCAB
                    key = _keys(tl.load(base + first + i, mask=exists, other=float("-inf")))
                    n1 += (exists & (key >= least + step)).to(tl.int32)
                    n2 += (exists & (key >= least + 2 * step)).to(tl.int32)
                    n3 += (exists & (key >= least + 3 * step)).to(tl.int32)
                digits = (tl.sum(n1, 0) >= top_k).to(tl.int32)
                digits += (tl.sum(n2, 0) >= top_k).to(tl.int32)
                digits += (tl.sum(n3, 0) >= top_k).to(tl.int32)
                least += digits * step
        sums = tl.zeros([CHUNK], tl.int64)
        for first in range(0, VOCAB, CHUNK):
            x = tl.load(base + first + i, mask=first + i < VOCAB, other=float("-inf"))
            sums += tl.where(_keys(x) >= least, _masses(x, largest, temperature, least_log, MOST), 0)
        total = tl.sum(sums, 0)
        # Of the tokens with the least key, the first ones are kept.
        num_least = tl.full([], VOCAB, tl.int64)
        if top_p < 1:
            exact = top_p * total.to(tl.float64)
            limit = exact.to(tl.int64)
            limit += (limit.to(tl.float64) < exact).to(tl.int64)
            limit = tl.maximum(tl.minimum(limit, total), 1)
            of_top_k = least
            least = tl.zeros([], tl.int32)
            for digit in range(8):
                step = 1 << (14 - 2 * digit)
                s1 = tl.zeros([CHUNK], tl.int64)
                s2 = tl.zeros([CHUNK], tl.int64)
                s3 = tl.zeros([CHUNK], tl.int64)
                for first in range(0, VOCAB, CHUNK):
                    x = tl.load(base + first + i, mask=first + i < VOCAB, other=float("-inf"))
                    key = _keys(x)
                    mass = tl.where(key >= of_top_k, _masses(x, largest, temperature, least_log, MOST), 0)
                    s1 += tl.where(key >= least + step, mass, 0)
                    s2 += tl.where(key >= least + 2 * step, mass, 0)
                    s3 += tl.where(key >= least + 3 * step, mass, 0)
                digits = (tl.sum(s1, 0) >= limit).to(tl.int32)
                digits += (tl.sum(s2, 0) >= limit).to(tl.int32)
                digits += (tl.sum(s3, 0) >= limit).to(tl.int32)
                least += digits * step
            sums = tl.zeros([CHUNK], tl.int64)
            of_least = tl.zeros([CHUNK], tl.int64)
            for first in range(0, VOCAB, CHUNK):
                x = tl.load(base + first + i, mask=first + i < VOCAB, other=float("-inf"))
                key = _keys(x)
                mass = _masses(x, largest, temperature, least_log, MOST)
                sums += tl.where(key > least, mass, 0)
                of_least = tl.where(key == least, mass, of_least)
            above = tl.sum(sums, 0)
            each = tl.maximum(tl.max(of_least, 0), 1)
            num_least = (limit - above + each - 1) // each
            total = above + num_least * each
        threshold = tl.minimum((tl.load(u + at) * total.to(tl.float64)).to(tl.int64), total - 1)
        before = tl.zeros([], tl.int64)
        least_before = tl.zeros([], tl.int32)
        found = tl.full([], VOCAB, tl.int32)
        for first in range(0, VOCAB, CHUNK):
            x = tl.load(base + first + i, mask=first + i < VOCAB, other=float("-inf"))
            key = _keys(x)
            is_least = (key == least).to(tl.int32)
            is_kept = (key > least) | ((is_least > 0) & (least_before + tl.cumsum(is_least, 0) <= num_least))
            mass = tl.where(is_kept, _masses(x, largest, temperature, least_log, MOST), 0)
            is_beyond = before + tl.cumsum(mass, 0) > threshold
            found = tl.minimum(found, tl.min(tl.where(is_beyond, first + i, VOCAB), 0))
            before += tl.sum(mass, 0)
            least_before += tl.sum(is_least, 0)
        # None if logits are not finite.
        token = tl.where(found < VOCAB, found, token)
    tl.store(out + row, token.to(tl.int64))
    tl.store(drawn + at, token.to(tl.int64))


@triton.jit
def _keys(x):  # type: ignore[no-untyped-def]
    """Maps bfloat16 values to int32 numbers of the same order, from 0 to 65,535. Both zeros are equal."""
    x = x.to(tl.float32)
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True) >> 16
    return tl.where(bits < 0, -1 - bits, bits + 32768)


@triton.jit
def _masses(x, largest, temperature, least_log, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    # As torch computes them.
    x = tl.div_rn(x.to(tl.float32) - largest, temperature)
    return tl.where(x < least_log, 0.0, libdevice.exp(x) * MOST).to(tl.int64)
