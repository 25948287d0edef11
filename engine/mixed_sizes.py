"""Sizes of CUDA graphs for mixed steps. Imports no torch."""

# Numbers of decoded sequences, beside the largest batch with a graph.
NUM_DECODED = (16, 32, 64, 96, 128, 192, 256)
# Numbers of prompt tokens. Schedulers cut chunks to these sizes, because padding costs as much as tokens.
NUM_PROMPT_TOKENS = (128, 192, 256, 384, 512, 768, 1024)
