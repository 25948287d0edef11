"""Sizes of CUDA graphs for mixed steps. Imports no torch."""

# Beside the largest batch with a graph.
NUM_DECODED = (16, 32, 64, 96, 128, 192, 256)
# Schedulers cut chunks to these sizes: padding costs as much as tokens.
NUM_PROMPT_TOKENS = (128, 192, 256, 384, 512, 768, 1024)
