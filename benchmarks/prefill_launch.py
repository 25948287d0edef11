"""Measures the host's launch and the whole forward of prefills, with CUDA graphs and with single kernel launches.

One engine on one GPU; weights and prompts are random.
"""

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.engine_loop import PAGE_SIZE, build_dummy_engine, open_model
from benchmarks.rows import Row, argument_parser, report
from tandem.engine.base import EngineBase
from tandem.engine.batch import Batch
from tandem.engine.token_sequence import TokenSequence

# Prompts of a forward, and tokens of each.
SHAPES = ((1, 128), (1, 512), (4, 256), (1, 1024), (64, 16), (1, 4096), (32, 256), (16, 512))
CHUNK_SIZE = 8192
NUM_PAGES = 2 * CHUNK_SIZE // PAGE_SIZE
NUM_REPEATS = 9
# Aim for a prompt of 128 tokens: time of the whole forward with graphs over the time without.
MAX_SHARE = 0.5


def batch_of(num_prompts: int, num_tokens: int, vocab_size: int, rng: random.Random) -> Batch:
    pages_of_each = -(-num_tokens // PAGE_SIZE)
    sequences = []
    for number in range(num_prompts):
        pages = list(range(number * pages_of_each, (number + 1) * pages_of_each))
        sequence = TokenSequence(rng.choices(range(vocab_size), k=num_tokens), num_tokens, pages)
        sequence.extend(num_tokens)
        sequences.append(sequence)
    return Batch("prefill", sequences)


def time_forwards(engine: EngineBase, batches: Sequence[Batch]) -> tuple[float, float]:
    """Return median milliseconds until the launch and until the tokens."""
    launched, whole = [], []
    for batch in batches:
        began = time.perf_counter()
        output = engine.forward(batch)
        launched.append(time.perf_counter() - began)
        output.token_ids()
        whole.append(time.perf_counter() - began)
    return statistics.median(launched[1:]) * 1e3, statistics.median(whole[1:]) * 1e3


def measure(model_dir: str, vocab_size: int) -> Iterator[Row]:
    plain: dict[tuple[int, int], float] = {}
    for with_graphs in (False, True):
        engine = build_dummy_engine(
            model_dir,
            lambda doing: None,
            num_pages=NUM_PAGES,
            cuda_graph_max_bs=0,
            prefill_cuda_graphs=with_graphs,
            max_chunk_tokens=CHUNK_SIZE,
            max_batch_size=0,
        )
        rng = random.Random(0)
        for shape in SHAPES:
            launch_ms, whole_ms = time_forwards(
                engine, [batch_of(*shape, vocab_size, rng) for _ in range(NUM_REPEATS + 1)]
            )
            name = f"{shape[0]} x {shape[1]}, {'graphs' if with_graphs else 'single launches'}"
            aim = MAX_SHARE * plain[shape] if with_graphs and shape == SHAPES[0] else None
            plain.setdefault(shape, whole_ms)
            yield Row(f"{name}: launch", launch_ms, "ms")
            yield Row(f"{name}: whole forward", whole_ms, "ms", high=aim)
        # Free memory for the next engine.
        del engine
        gc.collect()
        torch.cuda.empty_cache()


def main(argv: Sequence[str] | None = None) -> int:
    parser: argparse.ArgumentParser = argument_parser(__doc__)
    parser.add_argument("--model", required=True, help="a directory with a model's config.json; its weights are random")
    arguments = parser.parse_args(argv)
    model = open_model(parser, Path(arguments.model))
    rows = list(measure(arguments.model, model.vocab_size))
    return report(rows, f"Prefills of {Path(arguments.model).name}, bfloat16", arguments.json)


if __name__ == "__main__":
    sys.exit(main())
