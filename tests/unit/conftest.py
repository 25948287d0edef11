"""Unit tests use small tensors, for which threads gain nothing and wait long beside other tests."""

import os

# Read when torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"
