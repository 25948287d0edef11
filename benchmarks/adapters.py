"""Decode steps and prefills with LoRA adapters as times those of the base model, on one GPU.

Weights, adapters and pages are random numbers; contexts are not computed. Sequences take the adapters in turn. A step
is launched while the one before runs. Base and adapters alternate, and the fastest round of each counts.
"""

import random
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch

from benchmarks.rows import Row, argument_parser, report
from tandem.engine import graph_runner
from tandem.engine.adapters.base import NO_ADAPTER
from tandem.engine.adapters.host import HostAdapter, Matrices
from tandem.engine.adapters.slots import AdapterSlots
from tandem.engine.base import EngineBase
from tandem.engine.batch import Batch, ForwardMode
from tandem.engine.models.config import ModelConfig
from tandem.engine.output import ForwardOutput
from tandem.engine.token_sequence import TokenSequence

PAGE_SIZE = 16
DTYPE = "bfloat16"
NUM_WARMUPS, NUM_ROUNDS = 2, 3
# Forward passes of a round.
NUM_REPEATS: dict[ForwardMode, int] = {"decode": 20, "prefill": 2}
# Prompts of a prefill, and tokens of each.
PREFILLS = ((1, 8192), (8, 1024))
MOST_OF_DECODE, MOST_OF_PREFILL = 1.15, 1.1


class Ratios:
    """Times engines over one pool."""

    def __init__(self, base: EngineBase, adapted: EngineBase, vocab_size: int) -> None:
        self._base = base
        self._adapted = adapted
        self._vocab_size = vocab_size
        self._rng = random.Random(0)

    def decode(self, batch_size: int, context: int, adapters: Sequence[int]) -> Iterator[Row]:
        """Args: adapters: numbers of them to measure."""
        sequences = self._sequences(batch_size, context, context - 1)
        yield from self._compared("decode", f"decode step, batch {batch_size}", sequences, adapters, MOST_OF_DECODE)

    def prefill(self, num_prompts: int, prompt_len: int, adapters: Sequence[int]) -> Iterator[Row]:
        sequences = self._sequences(num_prompts, prompt_len, 0)
        adapters = [number for number in adapters if number <= num_prompts]
        yield from self._compared(
            "prefill", f"prefill, {num_prompts} x {prompt_len}", sequences, adapters, MOST_OF_PREFILL
        )

    def _compared(
        self, mode: ForwardMode, name: str, sequences: list[TokenSequence], adapters: Sequence[int], most: float
    ) -> Iterator[Row]:
        kinds = [None, 0, *adapters]
        seconds = {number: min(times) for number, times in self._rounds(mode, sequences, kinds).items()}
        yield Row(f"{name}: base", seconds[None] * 1e3, "ms")
        yield Row(f"{name}, slots but no adapter: times base", seconds[0] / seconds[None], "")
        for number in adapters:
            yield Row(f"{name}, {number} adapters: times base", seconds[number] / seconds[None], "", high=most)

    def _rounds(
        self, mode: ForwardMode, sequences: list[TokenSequence], kinds: Sequence[int | None]
    ) -> dict[int | None, list[float]]:
        """Args: kinds: numbers of adapters; None: an engine without slots."""
        times: dict[int | None, list[float]] = {kind: [] for kind in kinds}
        for _ in range(NUM_ROUNDS):
            for kind in kinds:
                for number, sequence in enumerate(sequences):
                    sequence.adapter_slot = number % kind if kind else NO_ADAPTER
                engine = self._base if kind is None else self._adapted
                times[kind].append(_seconds(engine, mode, sequences))
        return times

    def _sequences(self, count: int, length: int, cached_len: int) -> list[TokenSequence]:
        num_pages = -(-length // PAGE_SIZE)
        pages = self._rng.sample(range(self._base.pool.num_pages), count * num_pages)
        vocabulary = range(self._vocab_size)
        return [
            TokenSequence(
                self._rng.choices(vocabulary, k=length),
                length,
                array("i", pages[number * num_pages : (number + 1) * num_pages]),
                cached_len,
            )
            for number in range(count)
        ]


def _seconds(engine: EngineBase, mode: ForwardMode, sequences: Sequence[TokenSequence]) -> float:
    previous: ForwardOutput | None = None
    began, num_repeats = 0.0, NUM_REPEATS[mode]
    for number in range(NUM_WARMUPS + num_repeats):
        if number == NUM_WARMUPS:
            if previous is not None:
                previous.token_ids()
            previous, began = None, time.perf_counter()
        for sequence in sequences:
            # Repeat the same tokens.
            sequence.device_len = sequence.cached_len
            sequence.extend(sequence.remaining_len)
        output = engine.forward(Batch(mode, sequences))
        if previous is not None:
            previous.token_ids()
        previous = output
    assert previous is not None
    previous.token_ids()
    return (time.perf_counter() - began) / num_repeats


def random_adapter(slots: AdapterSlots, rank: int) -> HostAdapter:
    """Returns an adapter of all projections, without an effect on the size of numbers."""
    parts, num_bytes = [], 0
    for held in slots.held:
        of_matrix = []
        for size in held.linear.out_sizes:
            a = torch.empty(rank, held.linear.in_size, dtype=slots.dtype).uniform_(-0.02, 0.02)
            b = torch.empty(rank, size, dtype=slots.dtype).uniform_(-0.02, 0.02)
            of_matrix.append(Matrices(rank, a, b))
            num_bytes += a.nbytes + b.nbytes
        parts.append(of_matrix)
    ranks = [torch.full((len(of_matrix),), rank, dtype=torch.int32) for of_matrix in parts]
    return HostAdapter(parts, ranks, num_bytes)


def load_row(slots: AdapterSlots, rank: int) -> Row:
    """Times the copy of an adapter in host memory to its slot, after filling all slots."""
    adapter, stream = random_adapter(slots, rank), slots.new_stream()
    seconds = []
    for slot in range(slots.num_slots):
        began = time.perf_counter()
        slots.write_after(slot, adapter, stream, slots.fence())
        seconds.append(time.perf_counter() - began)
    return Row(f"load of {adapter.num_bytes / 1e6:.0f} MB into a slot", sorted(seconds)[len(seconds) // 2] * 1e3, "ms")


def build_engines(
    model_dir: Path, num_pages: int, batch_sizes: Sequence[int], num_slots: int, rank: int
) -> tuple[EngineBase, EngineBase, AdapterSlots]:
    """Returns an engine of the base, one with slots over the same weights and pages, and its slots. Needs CUDA."""
    from tandem.engine.attention.base import GraphableBackend
    from tandem.engine.attention.choice import choose_backend
    from tandem.engine.config import EngineConfig
    from tandem.engine.engine import Engine
    from tandem.engine.kvcache.cuda_pool import CudaKvPool
    from tandem.engine.models.build import build_model
    from tandem.engine.page_layout import page_layout_of
    from tandem.engine.weights.loader import load_weights

    config, device = ModelConfig.from_dir(model_dir), torch.device("cuda", torch.cuda.current_device())
    layout = page_layout_of(config, PAGE_SIZE, DTYPE, "auto")
    model = build_model(config, getattr(torch, DTYPE), device)
    slots = AdapterSlots(model, num_slots, rank, device)
    load_weights(model, model_dir, "dummy", None, device, lambda doing: None)
    pool = CudaKvPool(layout, num_pages, device)
    pool.memory.view(getattr(torch, DTYPE)).normal_()
    backend = choose_backend(
        EngineConfig(str(model_dir), device="cuda", dtype=DTYPE), layout, config.num_q_heads, device
    )
    engines = []
    for of_engine in (None, slots):
        attention = backend(pool, config.num_q_heads)
        assert isinstance(attention, GraphableBackend)
        num_table_pages = layout.num_pages_for(config.max_position_embeddings)
        # Others would not run.
        with mock.patch.object(graph_runner, "graph_sizes", lambda most: sorted(batch_sizes)):
            graphs = graph_runner.DecodeGraphs(
                model, attention, device, max(batch_sizes), num_table_pages, lambda doing: None, of_engine
            )
        engines.append(Engine(model, pool, attention, graphs, slots=of_engine))
    return engines[0], engines[1], slots


def main(argv: Sequence[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", required=True, help="a directory with a model's config.json; its weights are random")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=(32, 128))
    parser.add_argument("--adapters", type=int, nargs="+", default=(1, 8, 64))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=1024, help="tokens of each decoded sequence")
    arguments = parser.parse_args(argv)
    model_dir = Path(arguments.model)
    num_tokens = max(max(arguments.batch_sizes) * arguments.context, *(count * length for count, length in PREFILLS))
    num_slots = max(arguments.adapters)
    num_pages = -(-num_tokens // PAGE_SIZE)
    base, adapted, slots = build_engines(model_dir, num_pages, arguments.batch_sizes, num_slots, arguments.rank)
    rows = [load_row(slots, arguments.rank)]
    ratios = Ratios(base, adapted, ModelConfig.from_dir(model_dir).vocab_size)
    for batch_size in arguments.batch_sizes:
        rows += _told(ratios.decode(batch_size, arguments.context, arguments.adapters))
    for num_prompts, prompt_len in PREFILLS:
        rows += _told(ratios.prefill(num_prompts, prompt_len, arguments.adapters))
    return report(rows, f"Adapters of rank {arguments.rank}, {model_dir.name}, {DTYPE}", arguments.json)


def _told(rows: Iterator[Row]) -> list[Row]:
    told = []
    for row in rows:
        print(f"{row.name}: {row.value:,.3f} {row.unit}", file=sys.stderr, flush=True)
        told.append(row)
    return told


if __name__ == "__main__":
    sys.exit(main())
