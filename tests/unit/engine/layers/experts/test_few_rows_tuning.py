"""The kernel's stages fit into shared memory for every size that it accepts."""

import itertools

import pytest

from tandem.engine.layers.experts.few_rows_tuning import (
    FIXED_SHARED,
    MAX_SHARED,
    MIN_STAGES,
    SHARED_OF_WARP,
    Stages,
    tuning_of,
)

HIDDEN_SIZES = (64, 960, 2048, 2880, 4096, 5120, 7168, 8192)
INTERMEDIATE_SIZES = (16, 48, 768, 1024, 1408, 1536, 2048, 2112, 14336)


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("num_rows", range(1, 9))
def test_stages_fit(num_rows: int, is_fp8: bool) -> None:
    max_rows = 1 << (num_rows - 1).bit_length()
    number_bytes = 1 if is_fp8 else 2
    for is_down, in_size in [
        *itertools.product((False,), HIDDEN_SIZES),
        *itertools.product((True,), INTERMEDIATE_SIZES),
    ]:
        tuning = tuning_of(is_down, is_fp8, num_rows, in_size * number_bytes)
        stages = Stages.of(is_down, is_fp8, max_rows, in_size, tuning)
        assert stages.num_stages >= MIN_STAGES
        assert stages.shared_bytes + FIXED_SHARED + tuning.warps * SHARED_OF_WARP <= MAX_SHARED
        # Chunks keep copies aligned and do not cut blocks of scales.
        assert stages.chunk * number_bytes % 128 == 0 and stages.chunk * number_bytes <= tuning.max_chunk
        assert stages.chunk * -(-in_size * number_bytes // tuning.max_chunk) >= in_size


@pytest.mark.parametrize("num_rows", [1, 2])
def test_fp8_products_fit_beside_each_other(num_rows: int) -> None:
    """A multiprocessor has 228 KB, of which each block needs 1 KB for the system."""
    used = 0
    for is_down, in_size in ((False, 2048), (True, 768)):
        tuning = tuning_of(is_down, True, num_rows, in_size)
        used += Stages.of(is_down, True, num_rows, in_size, tuning).shared_bytes
        used += FIXED_SHARED + tuning.warps * SHARED_OF_WARP + 1024
    assert used <= 228 * 1024
