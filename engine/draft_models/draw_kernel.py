"""Draws of drafts from logits by one kernel, in a CUDA graph. Needs CUDA.

The rules are those of tandem.engine.sampler for rows without penalties, bias and masks. Sums are float32, and of tokens
as likely as the last kept one, top-p keeps all. So a token differs only if its random number is within rounding of two
tokens' border. That may cost the draft's acceptance, and nothing else.
"""

import math

import torch
import triton
import triton.language as tl

CHUNK = 8192


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
        CHUNK=min(CHUNK, triton.next_power_of_2(vocab_size)),
        LOG2_E=math.log2(math.e),
        num_warps=16,
    )


@triton.jit
def _keys(x):  # type: ignore[no-untyped-def]
    """Maps bfloat16 values to int32 numbers of the same order, from 0 to 65,535."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True) >> 16
    return tl.where(bits < 0, -1 - bits, bits + 32768)


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
    CHUNK: tl.constexpr,
    LOG2_E: tl.constexpr,
):
    """Program: a row."""
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * VOCAB
    i = tl.arange(0, CHUNK)
    top = tl.full([CHUNK], float("-inf"), tl.float32)
    place = tl.zeros([CHUNK], tl.int32)
    for first in range(0, VOCAB, CHUNK):
        x = tl.load(base + first + i, mask=first + i < VOCAB, other=float("-inf")).to(tl.float32)
        is_better = x > top
        top = tl.where(is_better, x, top)
        place = tl.where(is_better, first + i, place)
    largest = tl.max(top, 0)
    token = tl.min(tl.where(top == largest, place, VOCAB - 1), 0)
    temperature = tl.load(temperatures + row).to(tl.float32)
    at = tl.load(number) * pass_stride + row
    if temperature > 0:
        scale = LOG2_E / temperature
        top_k = tl.load(top_ks + row)
        top_p = tl.load(top_ps + row).to(tl.float32)
        min_p = tl.load(min_ps + row).to(tl.float32)
        # Tokens below it are dropped. Both searches find its bits, the highest first.
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
        sums = tl.zeros([CHUNK], tl.float32)
        for first in range(0, VOCAB, CHUNK):
            x = tl.load(base + first + i, mask=first + i < VOCAB, other=float("-inf"))
            sums += _masses(x, largest, scale, min_p, least)
        total = tl.sum(sums, 0)
        if top_p < 1:
            limit = top_p * total
            kept = least
            least = tl.zeros([], tl.int32)
            for digit in range(8):
                step = 1 << (14 - 2 * digit)
                s1 = tl.zeros([CHUNK], tl.float32)
                s2 = tl.zeros([CHUNK], tl.float32)
                s3 = tl.zeros([CHUNK], tl.float32)
                for first in range(0, VOCAB, CHUNK):
                    x = tl.load(base + first + i, mask=first + i < VOCAB, other=float("-inf"))
                    key = _keys(x)
                    mass = _masses(x, largest, scale, min_p, kept)
                    s1 += tl.where(key >= least + step, mass, 0.0)
                    s2 += tl.where(key >= least + 2 * step, mass, 0.0)
                    s3 += tl.where(key >= least + 3 * step, mass, 0.0)
                digits = (tl.sum(s1, 0) >= limit).to(tl.int32)
                digits += (tl.sum(s2, 0) >= limit).to(tl.int32)
                digits += (tl.sum(s3, 0) >= limit).to(tl.int32)
                least += digits * step
            least = tl.maximum(least, kept)
            sums = tl.zeros([CHUNK], tl.float32)
            for first in range(0, VOCAB, CHUNK):
                x = tl.load(base + first + i, mask=first + i < VOCAB, other=float("-inf"))
                sums += _masses(x, largest, scale, min_p, least)
            total = tl.sum(sums, 0)
        threshold = tl.load(u + at).to(tl.float32) * total
        before = 0.0
        found = tl.full([], VOCAB, tl.int32)
        for first in range(0, VOCAB, CHUNK):
            x = tl.load(base + first + i, mask=first + i < VOCAB, other=float("-inf"))
            mass = _masses(x, largest, scale, min_p, least)
            is_beyond = (before + tl.cumsum(mass, 0) > threshold) & (mass > 0)
            found = tl.minimum(found, tl.min(tl.where(is_beyond, first + i, VOCAB), 0))
            before += tl.sum(mass, 0)
        # None if rounding of sums reaches beyond the last token.
        token = tl.where(found < VOCAB, found, token)
    tl.store(out + row, token.to(tl.int64))
    tl.store(drawn + at, token.to(tl.int64))


@triton.jit
def _masses(x, largest, scale, min_p, least):  # type: ignore[no-untyped-def]
    """Probabilities as times that of the most likely token, 0 of dropped tokens."""
    mass = tl.exp2((x.to(tl.float32) - largest) * scale)
    return tl.where((mass >= min_p) & (_keys(x) >= least), mass, 0.0)
