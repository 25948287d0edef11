"""Compares one mixed forward, of a prompt's piece and a decode step, with two forwards (see Engine.mixes).

One engine on one GPU with random weights, and graphs. Launches follow a worker of role both: a mixed forward while the
one before runs; of two forwards, the piece while the step before runs, but the step after the piece has ended, because
a prompt that ends with the piece joins the step. Pieces are cut to a graph's size. The floor (engine/floors.py) is at
the matrix products' rate after two seconds of load.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.engine_limits import measure_limits, sustained_matmul_rate
from benchmarks.engine_loop import PAGE_SIZE, build_dummy_engine, open_model
from benchmarks.rows import Row, argument_parser, report
from tandem.engine.base import EngineBase
from tandem.engine.batch import Batch
from tandem.engine.floors import mixed_floor
from tandem.engine.output import ForwardOutput
from tandem.engine.token_sequence import TokenSequence

# Decoded sequences, and the context of each.
STEPS = ((8, 4096), (64, 1024), (64, 4096), (128, 1024))
# Tokens of a piece, and cached tokens of its prompt.
PIECES = ((128, 0), (256, 0), (384, 2048), (512, 0), (512, 2048), (1024, 2048), (2048, 0))
NUM_WARMUPS = 4
NUM_REPEATS = 20
MAX_BATCH_SIZE = max(num_rows for num_rows, _ in STEPS)
CHUNK_SIZE = max(num_tokens for num_tokens, _ in PIECES)
LONGEST_PIECE = max(num_tokens + num_cached for num_tokens, num_cached in PIECES)
NUM_PAGES = (max(num_rows * num_context for num_rows, num_context in STEPS) + LONGEST_PIECE) // PAGE_SIZE


def sequence_of(
    num_tokens: int, num_cached: int, first_page: int, vocab_size: int, rng: random.Random
) -> TokenSequence:
    pages = list(range(first_page, first_page + -(-num_tokens // PAGE_SIZE)))
    return TokenSequence(rng.choices(range(vocab_size), k=num_tokens), num_tokens, pages, num_cached)


def seconds_of(engine: EngineBase, decoded: Sequence[TokenSequence], piece: TokenSequence, *, mixed: bool) -> float:
    previous: ForwardOutput | None = None
    began = 0.0
    for number in range(NUM_WARMUPS + NUM_REPEATS):
        if number == NUM_WARMUPS:
            began = time.perf_counter()
        for sequence in (*decoded, piece):
            # Repeat the same tokens.
            sequence.device_len = sequence.cached_len
            sequence.extend(sequence.remaining_len)
        output = engine.forward(Batch.of(decoded if mixed else (), [piece]))
        if previous is not None:
            previous.token_ids()
        if not mixed:
            output.token_ids()
            output = engine.forward(Batch.of(decoded, ()))
        previous = output
    assert previous is not None
    previous.token_ids()
    return (time.perf_counter() - began) / NUM_REPEATS


def measure(engine: EngineBase, vocab_size: int, floor_s: Callable[[int, int, int, int], float]) -> Iterator[Row]:
    """Args: floor_s: of decoded sequences, tokens of each, tokens of a piece, and cached tokens."""
    rng = random.Random(0)
    for num_rows, num_context in STEPS:
        pages_of_each = num_context // PAGE_SIZE
        decoded = [
            sequence_of(num_context, num_context - 1, row * pages_of_each, vocab_size, rng) for row in range(num_rows)
        ]
        for most_tokens, num_cached in PIECES:
            num_tokens = engine.num_unpadded(num_rows, most_tokens)
            piece = sequence_of(num_cached + num_tokens, num_cached, num_rows * pages_of_each, vocab_size, rng)
            name = f"{num_rows} x {num_context}, piece of {num_tokens} behind {num_cached}"
            apart_s, mixed_s = (seconds_of(engine, decoded, piece, mixed=mixed) for mixed in (False, True))
            yield Row(f"{name}: apart", apart_s * 1e3, "ms")
            yield Row(f"{name}: mixed", mixed_s * 1e3, "ms")
            yield Row(f"{name}: mixed", mixed_s / floor_s(num_rows, num_context, num_tokens, num_cached), "x floor")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", required=True, help="a directory with a model's config.json; its weights are random")
    arguments = parser.parse_args(argv)
    model = open_model(parser, Path(arguments.model))
    limits = measure_limits()._replace(matmul_rate=sustained_matmul_rate())
    engine = build_dummy_engine(
        arguments.model,
        lambda doing: None,
        num_pages=NUM_PAGES,
        cuda_graph_max_bs=MAX_BATCH_SIZE,
        max_chunk_tokens=CHUNK_SIZE,
        max_batch_size=MAX_BATCH_SIZE,
        mixed_steps=True,
    )
    rows = list(measure(engine, model.vocab_size, partial(mixed_floor, model, limits)))
    return report(rows, f"A step and a piece of a prompt, {Path(arguments.model).name}, bfloat16", arguments.json)


if __name__ == "__main__":
    sys.exit(main())
