"""The ring fits into shared memory, and its blocks share the work evenly."""

from collections.abc import Sequence

import pytest

from tandem.engine.layers.ring_plan import MAX_UNITS, UNIT_ROWS, Ring, ring_of

NUM_SMS = 132
# Of a block.
MAX_SHARED = 227 * 1024
# Of Qwen3-30B-A3B, DeepSeek-V2-Lite, GLM-4.7-Flash and Qwen3-0.6B.
SIZES = [
    ((151_936,), 2048),
    ((5120,), 2048),
    ((2048,), 4096),
    ((3072, 576), 2048),
    ((768, 576), 2048),
    ((151_936,), 1024),
]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8])
@pytest.mark.parametrize(("out_sizes", "in_size"), SIZES)
def test_sizes_of_models(out_sizes: tuple[int, ...], in_size: int, num_tokens: int) -> None:
    check(ring_of(out_sizes, in_size, num_tokens, NUM_SMS, MAX_SHARED), out_sizes, num_tokens)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8])
@pytest.mark.parametrize(("out_size", "in_size"), [(5120, 2048), (2048, 4096)])
def test_fp8_matrices(out_size: int, in_size: int, num_tokens: int) -> None:
    ring = ring_of([out_size], in_size, num_tokens, NUM_SMS, MAX_SHARED, is_fp8=True)
    check(ring, [out_size], num_tokens)
    # A block's weights all fit, so its copies never wait.
    assert ring is not None and ring.num_stages == -(-out_size // UNIT_ROWS // ring.num_blocks) * ring.split


def check(ring: Ring | None, out_sizes: Sequence[int], num_tokens: int) -> None:
    assert ring is not None
    num_units = sum(out_sizes) // UNIT_ROWS
    of_block = -(-num_units // ring.num_blocks)
    assert ring.num_blocks <= NUM_SMS and of_block == -(-num_units // NUM_SMS)
    assert ring.num_units <= MAX_UNITS
    # One stage is enough where a block has no more.
    assert ring.num_stages >= min(2, of_block * ring.split)
    room = 1 << (num_tokens - 1).bit_length()
    parts = 2 * ring.num_warps * ring.num_units * room * UNIT_ROWS * 4
    squares, barriers = ring.num_warps * room * 4, 16 * ring.num_stages
    assert ring.shared_bytes + parts + squares + barriers <= MAX_SHARED


def test_other_sizes() -> None:
    assert ring_of([64, 64], 64, 1, NUM_SMS, MAX_SHARED) is not None
    assert ring_of([64, 64], 64, 9, NUM_SMS, MAX_SHARED) is None
    assert ring_of([64, 64], 96, 1, NUM_SMS, MAX_SHARED) is None
    assert ring_of([64, 60], 64, 1, NUM_SMS, MAX_SHARED) is None
    # Blocks of other GPUs may have less memory.
    assert ring_of([64, 64], 64, 1, NUM_SMS, 99 * 1024) is None
    # Too small and too large to be faster.
    assert ring_of([2048], 2048, 1, NUM_SMS, MAX_SHARED) is None
    assert ring_of([6144], 4096, 1, NUM_SMS, MAX_SHARED) is None
    assert ring_of([2048], 2048, 1, NUM_SMS, MAX_SHARED, is_fp8=True) is None
    assert ring_of([6144], 4096, 1, NUM_SMS, MAX_SHARED, is_fp8=True) is None
    assert ring_of([128_256], 4096, 1, NUM_SMS, MAX_SHARED) is None
