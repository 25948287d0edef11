"""Decode steps and prefills of one engine on one GPU at given contexts, against their floors (engine/floors.py).

Contexts are not computed: decoded sequences read pages of random numbers, scattered over the pool, so a long context
takes no longer to set up than a short one. Weights are random. A step is launched while the one before runs.
"""

import random
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.engine_limits import measure_limits
from benchmarks.engine_loop import PAGE_SIZE, build_dummy_engine, open_model
from benchmarks.rows import Row, argument_parser, report
from tandem.engine.base import EngineBase
from tandem.engine.batch import Batch, ForwardMode
from tandem.engine.config import KV_CACHE_DTYPES
from tandem.engine.floors import DTYPE, Limits, decode_floor, prefill_floor
from tandem.engine.models.config import ModelConfig
from tandem.engine.output import ForwardOutput
from tandem.engine.token_sequence import TokenSequence

NUM_WARMUPS, NUM_STEPS = 4, 24
CHUNK_SIZE = 16384


class Contexts:
    def __init__(self, engine: EngineBase, model: ModelConfig, limits: Limits, kv_cache_dtype: str = "auto") -> None:
        self._engine = engine
        self._model = model
        self._limits = limits
        self._kv_cache_dtype = kv_cache_dtype
        self._rng = random.Random(0)

    def decode(self, batch_size: int, context: int) -> Iterator[Row]:
        sequences = self._sequences(batch_size, context, context - 1)
        seconds, launching = self._seconds("decode", sequences, NUM_WARMUPS, NUM_STEPS)
        floor = decode_floor(self._model, self._limits, batch_size, context, self._kv_cache_dtype)
        name = f"decode step, batch {batch_size}, contexts of {context}"
        yield Row(name, seconds * 1e3, "ms")
        yield Row(f"{name}, times the floor of {floor * 1e3:.2f} ms", seconds / floor, "")
        yield Row(f"{name}, host's launch", launching * 1e3, "ms")

    def prefill(self, num_prompts: int, prompt_len: int) -> Iterator[Row]:
        sequences = self._sequences(num_prompts, prompt_len, 0)
        per_forward = max(1, CHUNK_SIZE // prompt_len)
        batches = [sequences[first : first + per_forward] for first in range(0, num_prompts, per_forward)]
        self._seconds("prefill", batches[0], 0, 1)
        seconds = sum(self._seconds("prefill", batch, 0, 1)[0] for batch in batches)
        floor = prefill_floor(self._model, self._limits, num_prompts, prompt_len)
        name = f"prefill, {num_prompts} x {prompt_len}"
        yield Row(name, num_prompts * prompt_len / seconds, "tok/s")
        yield Row(f"{name}, times the floor of {floor * 1e3:.0f} ms", seconds / floor, "")

    def _seconds(
        self, mode: ForwardMode, sequences: Sequence[TokenSequence], num_warmups: int, num_repeats: int
    ) -> tuple[float, float]:
        """Returns the seconds of a forward pass, and the host's of its launch."""
        previous: ForwardOutput | None = None
        began, launching = time.perf_counter(), 0.0
        for number in range(num_warmups + num_repeats):
            if number == num_warmups:
                if previous is not None:
                    previous.token_ids()
                previous, began, launching = None, time.perf_counter(), 0.0
            for sequence in sequences:
                # Repeat the same tokens.
                sequence.device_len = sequence.cached_len
                sequence.extend(sequence.remaining_len)
            launched = time.perf_counter()
            output = self._engine.forward(Batch(mode, sequences))
            launching += time.perf_counter() - launched
            if previous is not None:
                previous.token_ids()
            previous = output
        assert previous is not None
        previous.token_ids()
        return (time.perf_counter() - began) / num_repeats, launching / num_repeats

    def _sequences(self, count: int, length: int, cached_len: int) -> list[TokenSequence]:
        num_pages = -(-length // PAGE_SIZE)
        pages = self._rng.sample(range(self._engine.pool.num_pages), count * num_pages)
        vocabulary = range(self._model.vocab_size)
        return [
            TokenSequence(
                self._rng.choices(vocabulary, k=length),
                length,
                array("i", pages[number * num_pages : (number + 1) * num_pages]),
                cached_len,
            )
            for number in range(count)
        ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", required=True, help="a directory with a model's config.json; its weights are random")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=(1, 8, 32, 128, 256))
    parser.add_argument("--contexts", type=int, nargs="+", default=(1024, 16384), help="tokens of each sequence")
    parser.add_argument("--max-tokens", type=int, default=2**21, help="larger steps are left out (default: 2,097,152)")
    parser.add_argument("--prefill", type=int, nargs=2, default=(8, 8192), metavar=("PROMPTS", "TOKENS"))
    parser.add_argument("--kv-cache-dtype", choices=tuple(KV_CACHE_DTYPES), default="auto", help="data type of pages")
    arguments = parser.parse_args(argv)
    model = open_model(parser, Path(arguments.model))
    steps = [
        (batch_size, context)
        for context in arguments.contexts
        for batch_size in arguments.batch_sizes
        if batch_size * context <= arguments.max_tokens
    ]
    num_tokens = max(
        [batch_size * context for batch_size, context in steps] + [arguments.prefill[0] * arguments.prefill[1]]
    )
    engine = build_dummy_engine(
        arguments.model,
        lambda doing: None,
        kv_cache_dtype=arguments.kv_cache_dtype,
        num_pages=-(-num_tokens // PAGE_SIZE),
        cuda_graph_max_bs=max(arguments.batch_sizes),
        max_chunk_tokens=CHUNK_SIZE,
        max_batch_size=max(arguments.batch_sizes),
    )
    if arguments.kv_cache_dtype == "auto":
        engine.pool.memory.view(getattr(torch, DTYPE)).normal_()
    else:
        # Numbers from -2 to 2, of 8 bits and of 16.
        engine.pool.memory.random_(0, 256).bitwise_and_(0xBF)
    contexts = Contexts(engine, model, measure_limits(), arguments.kv_cache_dtype)
    rows = []
    for measured in (*(contexts.decode(*step) for step in steps), contexts.prefill(*arguments.prefill)):
        for row in measured:
            print(f"{row.name}: {row.value:,.3f} {row.unit}", file=sys.stderr, flush=True)
            rows.append(row)
    pages = "" if arguments.kv_cache_dtype == "auto" else f", KV {arguments.kv_cache_dtype}"
    return report(rows, f"Contexts, {Path(arguments.model).name}, bfloat16{pages}", arguments.json)


if __name__ == "__main__":
    sys.exit(main())
