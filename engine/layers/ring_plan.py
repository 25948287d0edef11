"""Shared memory of few_rows_ring.cu. Needs no GPU."""

from collections.abc import Sequence
from typing import NamedTuple

MAX_TOKENS = 8
# Rows of a unit of work, and the most units whose sums a block adds up together.
UNIT_ROWS, MAX_UNITS = 8, 8
# Bytes of a row that a warp multiplies at a time.
STRETCH = 128
MAX_STAGE_BYTES = 32 * 1024
SPLITS = (1, 2)
MIN_STAGES = 2
# Measured on an H200 with the matrices of Qwen3-30B-A3B. Two matrices save a launch, so they may be smaller.
MIN_BYTES, MAX_BYTES = 16 * 10**6, 24 * 2**20
MIN_FP8_BYTES, MAX_FP8_BYTES = 8 * 10**6, 12 * 10**6
MIN_VOCABULARY, MAX_VOCABULARY_IN = 65536, 2048
# Of a block.
SHARED_BYTES = 222 * 1024
# Barriers and sums of squares.
FIXED_BYTES = 1024
NUM_WARPS = 8


class Ring(NamedTuple):
    """
    Attributes:
        num_units: units whose sums a block adds up together.
        split: stages of a unit.
        shared_bytes: of the stages and the tokens.
    """

    num_blocks: int
    num_units: int
    split: int
    num_stages: int
    num_warps: int
    shared_bytes: int


def ring_of(
    out_sizes: Sequence[int],
    in_size: int,
    num_tokens: int,
    num_sms: int,
    shared_memory: int,
    *,
    is_fp8: bool = False,
) -> Ring | None:
    """Returns None if the kernel does not multiply such matrices, or not faster.

    Args:
        out_sizes: of each matrix.
        shared_memory: bytes that a block may have; some GPUs after Hopper have too few.
    """
    if shared_memory < SHARED_BYTES or not _is_faster(out_sizes, in_size, is_fp8=is_fp8):
        return None
    stretches, rest = divmod(in_size * (1 if is_fp8 else 2), STRETCH)
    if rest or not 0 < num_tokens <= MAX_TOKENS or any(size % UNIT_ROWS for size in out_sizes):
        return None
    num_all = sum(out_sizes) // UNIT_ROWS
    of_block = -(-num_all // num_sms)
    num_units = -(-of_block // -(-of_block // MAX_UNITS))
    room = 1 << (num_tokens - 1).bit_length()
    tokens = room * (2 * in_size + (16 if is_fp8 else 64))
    sums = 2 * NUM_WARPS * num_units * room * UNIT_ROWS * 4
    available = SHARED_BYTES - FIXED_BYTES - tokens - sums
    for split in SPLITS:
        stage = UNIT_ROWS * stretches // split * STRETCH
        if stretches % split or stage > MAX_STAGE_BYTES:
            continue
        num_stages = min(available // stage, of_block * split)
        if num_stages >= min(MIN_STAGES, of_block * split):
            num_blocks = -(-num_all // of_block)
            return Ring(num_blocks, num_units, split, num_stages, NUM_WARPS, num_stages * stage + tokens)
    return None


def _is_faster(out_sizes: Sequence[int], in_size: int, *, is_fp8: bool) -> bool:
    if is_fp8:
        return len(out_sizes) == 1 and MIN_FP8_BYTES <= out_sizes[0] * in_size <= MAX_FP8_BYTES
    num_bytes = 2 * sum(out_sizes) * in_size
    if out_sizes[0] >= MIN_VOCABULARY:
        return in_size <= MAX_VOCABULARY_IN
    return num_bytes <= MAX_BYTES and (len(out_sizes) > 1 or num_bytes >= MIN_BYTES)
