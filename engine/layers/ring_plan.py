"""Shared memory of few_rows_ring.cu. Needs no GPU."""

from collections.abc import Sequence
from typing import NamedTuple

MAX_TOKENS = 8
# Rows of a unit of work, and the most units whose sums a block adds up together.
UNIT_ROWS, MAX_UNITS = 8, 8
# Bytes of a row that a warp multiplies at a time.
STRETCH_BYTES = 128
MAX_STAGE_BYTES = 64 * 1024
SPLITS = (1, 2, 4)
MIN_STAGES = 2
# few_rows.cu multiplies larger matrices as fast, except a vocabulary.
MAX_BYTES, MIN_VOCABULARY = 24 * 2**20, 65536
# Of a block. With one or two tokens it fits beside a block of the experts before it.
SHARED_BYTES_OF_FEW, FEW_TOKENS = 140 * 1024, 2
SHARED_BYTES = 224 * 1024
# Barriers and sums of squares.
FIXED_BYTES = 1024
SCALE_BYTES = 256
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


def ring_of(out_sizes: Sequence[int], in_size: int, number_bytes: int, num_tokens: int, num_sms: int) -> Ring | None:
    """Returns None if the kernel does not multiply such matrices, or not faster.

    Args:
        out_sizes: of each matrix.
        number_bytes: of a weight: 1 for FP8, or 2.
    """
    stretches, rest = divmod(in_size * number_bytes, STRETCH_BYTES)
    num_all = sum(out_sizes) // UNIT_ROWS
    of_block = -(-num_all // num_sms)
    num_units = -(-of_block // -(-of_block // MAX_UNITS))
    is_large = sum(out_sizes) * in_size * number_bytes > MAX_BYTES and sum(out_sizes) < MIN_VOCABULARY
    if rest or is_large or num_tokens > MAX_TOKENS or any(size % UNIT_ROWS for size in out_sizes):
        return None
    room = 1 << (num_tokens - 1).bit_length()
    tokens = room * (2 * in_size + (64 if number_bytes == 2 else 16))
    sums = 2 * NUM_WARPS * num_units * room * UNIT_ROWS * 4
    available = (SHARED_BYTES_OF_FEW if num_tokens <= FEW_TOKENS else SHARED_BYTES) - FIXED_BYTES - tokens - sums
    for split in SPLITS:
        stage = UNIT_ROWS * stretches // split * STRETCH_BYTES
        if stretches % split or stage > MAX_STAGE_BYTES:
            continue
        stage += SCALE_BYTES if number_bytes == 1 else 0
        num_stages = min(available // stage, of_block * split)
        if num_stages >= min(MIN_STAGES, of_block * split):
            num_blocks = -(-num_all // of_block)
            return Ring(num_blocks, num_units, split, num_stages, NUM_WARPS, num_stages * stage + tokens)
    return None
