"""Tensors of unit tests are so small that threads gain nothing, and wait long for each other where other tests run."""

import os

# torch reads it when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"
