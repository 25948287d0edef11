"""What each operation of a prefill's layer takes on one GPU, over the time that its matrix products take at the rate of
the same run, or its bytes at the copy bandwidth.

Each row is one operation of the layer (one kernel or more), run for every layer of the model one after the other in a
CUDA graph: microseconds of one layer, median of several. Rows "of" another one are part of it and not in the sum. The
rate that floors come from is that of a moment; how it falls while a GPU multiplies without a rest is told too.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine_limits import measure_limits, sustained_matmul_rate
from benchmarks.engine_loop import open_model
from tandem.engine.config import QUANTIZATIONS


def prefill_shape(text: str) -> tuple[int, int]:
    """ "8x1024" to (8, 1024). Raises argparse.ArgumentTypeError."""
    count, times, length = text.partition("x")
    if not (times and count.isdecimal() and length.isdecimal() and int(count) and int(length)):
        raise argparse.ArgumentTypeError(f"{text!r} is not prompts x tokens, such as 8x1024")
    return int(count), int(length)


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a directory with a model's config.json")
    parser.add_argument(
        "--forwards",
        type=prefill_shape,
        nargs="+",
        default=((2, 8192), (32, 512), (1, 512)),
        metavar="PROMPTSxTOKENS",
        help="prompts of a forward and tokens of each (default: 2x8192 32x512 1x512)",
    )
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default=QUANTIZATIONS[0], help="fp8: FP8 weights")
    arguments = parser.parse_args(argv)
    model = open_model(parser, arguments.model, arguments.quantization)
    # It is imported here because a machine without CUDA has nothing to import.
    from benchmarks.layer_kernels import LayerKernels

    limits = measure_limits()
    kernels = LayerKernels(model, limits)
    console = Console(width=100)
    for num_prompts, prompt_len in arguments.forwards:
        table = Table("one layer", title=f"{arguments.model.name}, {num_prompts} x {prompt_len} tokens")
        for column in ("µs", "floor, µs", "of the floor's rate", "share"):
            table.add_column(column, justify="right")
        rows = list(kernels.prefill(num_prompts, prompt_len))
        time, floor = (sum(values) for values in zip(*((r.time, r.floor) for r in rows if not r.is_part), strict=True))
        for row in rows:
            figures = (f"{row.time:.1f}", f"{row.floor:.1f}", f"{row.floor / row.time:.2f}", f"{row.time / time:.1%}")
            table.add_row(row.name, *figures)
        table.add_section()
        table.add_row("sum", f"{time:.1f}", f"{floor:.1f}", f"{floor / time:.2f}", "")
        console.print(table)
    rates = f"{limits.matmul_rate / 1e12:.0f} TFLOP/s, {sustained_matmul_rate() / 1e12:.0f} after two seconds"
    console.print(f"copy {limits.copy_bandwidth / 1e12:.2f} TB/s, matmul {rates}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
