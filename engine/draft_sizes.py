"""Sizes of CUDA graphs for decode steps with drafts. Imports no torch."""

from bisect import bisect_left

# Of the sequences' tokens and drafts together. Beyond the last, rows take as long as further steps.
SIZES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MAX_ROWS = SIZES[-1]


def draft_graph_sizes(max_batch_size: int, max_drafts: int) -> tuple[int, ...]:
    """Returns the SIZES that steps with drafts need; none without drafts."""
    largest = max_batch_size * (1 + max_drafts) if max_drafts else 0
    return SIZES[: bisect_left(SIZES, largest) + 1] if largest else ()
