"""Tunings of few_rows_experts.cu and its shared memory."""

from typing import NamedTuple

# Matrix rows of a unit.
UNIT_ROWS = 16
# Bytes of a matrix row per stage. Rows in one stage are copied together.
MAX_CHUNK = 2048
# With more rows, copies of whole rows of this size are faster, if more warps share them.
WHOLE_ROW = 4096
PADDING = 128
MIN_STAGES, MAX_STAGES = 2, 16
# Of a stage with FP8.
SCALE_BYTES = 128
MAX_SHARED = 224 * 1024
# Tables and barriers of a block, and sums of a warp.
FIXED_SHARED, SHARED_OF_WARP = 6 * 1024, 1024


class Tuning(NamedTuple):
    """Macros of few_rows_experts.cu.

    Attributes:
        shared_bytes: shared memory of a block, which sets the number of stages.
        max_chunk: bytes of a matrix row per stage.
    """

    shared_bytes: int
    warps: int
    prefetch: int = 0
    release: int = 0
    max_chunk: int = MAX_CHUNK


def tuning_of(is_down: bool, is_fp8: bool, num_rows: int, row_bytes: int) -> Tuning:
    """Measured with the matrices of Qwen3-30B-A3B on an H200, in bfloat16 and in FP8 with channel scales.

    Args:
        row_bytes: bytes of a matrix row.
    """
    # Fewer warps share few stretches of 64 bytes evenly.
    warps = 8 if row_bytes >= 1024 else 4
    if is_fp8 and is_down and num_rows <= 2:
        # Blocks of both products fit beside each other, so down starts early.
        return Tuning(70 * 1024, warps, prefetch=3)
    if is_fp8 and not is_down:
        return Tuning(155 * 1024, warps, release=2)
    if is_down and num_rows == 1 and MAX_CHUNK < row_bytes <= WHOLE_ROW and row_bytes % PADDING == 0:
        # A unit is one copy, not two of each of its rows.
        return Tuning(MAX_SHARED, 16, max_chunk=WHOLE_ROW)
    if is_down:
        return Tuning(140 * 1024 if num_rows == 1 else MAX_SHARED, warps)
    if num_rows > 4 and row_bytes == WHOLE_ROW:
        return Tuning(MAX_SHARED, 16, release=4, max_chunk=WHOLE_ROW)
    return Tuning(MAX_SHARED, warps, release=4)


class Stages(NamedTuple):
    """The ring of a block in shared memory, as few_rows_experts.cu lays it out.

    Attributes:
        chunk: numbers of a matrix row per stage.
        shared_bytes: size of the ring, and of the inputs that gate and up holds.
    """

    chunk: int
    num_stages: int
    shared_bytes: int

    @staticmethod
    def of(is_down: bool, is_fp8: bool, max_rows: int, in_size: int, tuning: Tuning) -> "Stages":
        """Returns at least MIN_STAGES stages, of more memory than the tuning's if need be.

        Args:
            max_rows: rows of the batch that a stage has room for.
            in_size: numbers of a matrix row; of gate and up at most 8192.
        """
        number_bytes = 1 if is_fp8 else 2
        row_bytes = in_size * number_bytes
        num_chunks = -(-row_bytes // tuning.max_chunk)
        # Stages of a row are as equal as possible.
        chunk_bytes = _padded(-(-row_bytes // num_chunks))
        chunk = chunk_bytes // number_bytes
        matrix_row = row_bytes if num_chunks == 1 else chunk_bytes + 64
        inputs = max_rows * (_padded(2 * (chunk if is_down else in_size)) + (16 if is_fp8 else 64))
        of_stage = _padded(UNIT_ROWS * matrix_row + (inputs if is_down else 0) + (SCALE_BYTES if is_fp8 else 0))
        held = 0 if is_down else inputs
        fixed = FIXED_SHARED + tuning.warps * SHARED_OF_WARP + held
        num_stages = (tuning.shared_bytes - fixed) // of_stage
        if num_stages < MIN_STAGES:
            num_stages = (MAX_SHARED - fixed) // of_stage
        num_stages = min(num_stages, MAX_STAGES)
        return Stages(chunk, num_stages, num_stages * of_stage + held)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // PADDING) * PADDING
