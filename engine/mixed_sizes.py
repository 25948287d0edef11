"""Of what sizes there are CUDA graphs that decode and compute prompts. Imports no torch."""

# There are graphs of so many sequences that are decoded, beside the most that steps with a graph have.
NUM_DECODED = (16, 32, 64, 96, 128, 192, 256)
# And of so many tokens of prompts. What is padding is computed too, so whoever cuts prompts into pieces cuts them to
# these sizes.
NUM_PROMPT_TOKENS = (128, 192, 256, 384, 512, 768, 1024)
