"""What each operation of a decode step's layer takes on one GPU, over the time that its bytes take at the copy
bandwidth of the same run, or its operations at the rate of matrix products, whichever is longer.

Each row is one operation of the layer (one kernel or more), run for every layer of the model one after the other in a
CUDA graph, so that no matrix is in a cache when its turn comes: microseconds of one layer, median of several.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine_limits import measure_limits
from benchmarks.engine_loop import open_model
from tandem.engine.config import QUANTIZATIONS


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a directory with a model's config.json")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=(1, 8, 16, 32, 128))
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default=QUANTIZATIONS[0], help="fp8: FP8 weights")
    parser.add_argument("--kv-len", type=int, default=1152, help="tokens of each sequence")
    arguments = parser.parse_args(argv)
    model = open_model(parser, arguments.model, arguments.quantization)
    # It is imported here because a machine without CUDA has nothing to import.
    from benchmarks.layer_kernels import LayerKernels

    limits = measure_limits()
    kernels = LayerKernels(model, limits)
    console = Console(width=100)
    for batch_size in arguments.batch_sizes:
        table = Table("one layer", title=f"{arguments.model.name}, batch {batch_size}")
        for column in ("µs", "floor, µs", "times the floor"):
            table.add_column(column, justify="right")
        for row in kernels.decode_step(batch_size, arguments.kv_len):
            table.add_row(row.name, f"{row.time:.1f}", f"{row.floor:.1f}", f"{row.time / row.floor:.2f}")
        console.print(table)
    console.print(f"copy {limits.copy_bandwidth / 1e12:.2f} TB/s, matmul {limits.matmul_rate / 1e12:.0f} TFLOP/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
