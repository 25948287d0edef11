"""Sizes of CUDA graphs for mixed steps. Imports no torch."""

from bisect import bisect_left

# Decoded sequences, beside the largest batch with a graph.
NUM_DECODED = (16, 32, 64, 96, 128, 256)
# Decoded and prompt tokens together: tiles of matrix products fit these. 272 rows take an eighth longer than 256.
NUM_ROWS = (128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1152, 1280)
# Fewer prompt tokens take no less time, and of more a graph saves little.
MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS = 64, 1024
# Prompt tokens beside more decoded sequences than NUM_DECODED has. Estimates take them for all.
NUM_PROMPT_TOKENS = (128, 192, 256, 384, 512, 768, 1024)
MULTIPLE = 16


def prompt_sizes(num_decoded: int, max_prompt_tokens: int) -> tuple[int, ...]:
    """Returns the numbers of prompt tokens beside a number of decoded sequences, ascending, up to the first of at least
    max_prompt_tokens or MAX_PROMPT_TOKENS. Schedulers cut chunks to these sizes: padding costs as much as tokens."""
    sizes: tuple[int, ...] = NUM_PROMPT_TOKENS
    if num_decoded <= NUM_DECODED[-1]:
        left = (num_rows - max(num_decoded, NUM_DECODED[0]) for num_rows in NUM_ROWS)
        sizes = tuple(size // MULTIPLE * MULTIPLE for size in left if size >= MIN_PROMPT_TOKENS)
    return sizes[: bisect_left(sizes, min(max_prompt_tokens, MAX_PROMPT_TOKENS)) + 1]
