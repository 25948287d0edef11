"""Measurements before a GPU's pool is sized."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tandem.engine import dry_run
from tandem.engine.base import EngineBase
from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import MAX_PREFILL_BATCH_SIZE, EngineConfig
from tandem.engine.draft_graphs import SIZES as DRAFT_ROWS
from tandem.engine.dry_run import (
    LARGE_LAUNCH_BOUND,
    Measured,
    launch_bound_large_sizes,
    launch_bound_sizes,
    measure_memory,
)
from tandem.engine.engine import Engine
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.engine.mixed_graphs import MixedSizes
from tandem.engine.output import ForwardOutput
from tandem.engine.prefill_graphs import SIZES
from tandem.engine.trial_batches import TrialBatches
from tests.fakes.clock import FakeClock
from tests.fakes.engine import FakeEngine
from tests.fakes.model_shapes import LLAMA_8B
from tests.fakes.page_layout import OpaqueLayout
from tests.fakes.rank_threads import ThreadCollectives, ThreadGroup, run_ranks

MIB = 2**20


def build(model_dir: str, num_pages: int) -> Engine:
    return build_engine(
        EngineConfig(model_dir, load_format="dummy", num_pages=num_pages), "dry-run", list[str]().append
    )


class FakeDevice:
    """A fake GPU's memory: a forward pass takes 1 MiB a token, a graph 10 MiB for good."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Engine, *, computes: bool = True) -> None:
        """Args: computes: False: forward passes are recorded, not run."""
        self._computes = computes
        self.free = 900 * MIB
        self.batches: list[Batch] = []
        self.num_captured = 0
        self._peak = 0
        self._forward = engine.forward
        monkeypatch.setattr(engine, "forward", self.run)
        self.shallow_batches: list[Batch] = []
        shallow = engine.shallow()
        monkeypatch.setattr(shallow, "forward", self.shallow_batches.append)
        monkeypatch.setattr(engine, "shallow", lambda: shallow)
        monkeypatch.setattr(dry_run, "free_bytes", lambda: self.free)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 50 * MIB)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 50 * MIB + self._peak)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (self.free, 2000 * MIB))

    def run(self, batch: Batch) -> object:
        self.batches.append(batch)
        self._peak = batch.num_tokens * MIB
        return self._forward(batch) if self._computes else SimpleNamespace(logprobs=list)

    def capture(self, batch_size: int) -> object:
        self.num_captured += 1
        # The first graph also takes the shared memory.
        self.free -= 4 * MIB + 10 * MIB * len(dry_run.graph_sizes(batch_size))
        return object()


def test_largest_forward_is_mixed_if_steps_are(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(
        model_dir,
        load_format="dummy",
        num_pages=1,
        max_chunk_tokens=300,
        max_batch_size=9,
        cuda_graph_max_bs=0,
        mixed_steps=True,
    )
    engine = build_engine(config, "dry-run", list[str]().append)
    device = FakeDevice(monkeypatch, engine)
    memory = measure_memory(engine, config, 1000 * MIB, None, None, None).memory
    largest = device.batches[-1]
    assert (largest.mode, len(largest.decoded), len(largest.prompts)) == ("mixed", 9, MAX_PREFILL_BATCH_SIZE)
    assert memory.forward == 309 * MIB


def test_the_largest_forwards_run_on_a_single_page(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(model_dir, 1)
    device = FakeDevice(monkeypatch, engine)
    config = EngineConfig(model_dir, max_chunk_tokens=300, max_batch_size=9, cuda_graph_max_bs=4)
    memory, prefill_sizes, *_ = measure_memory(engine, config, 1000 * MIB, device.capture, None, None)
    # New prompts first, then continued ones.
    prefills = [("prefill", num_tokens) for num_tokens in (*dry_run.SMALL_PREFILLS, 300)]
    forwards = [(b.mode, b.num_tokens) for b in device.batches]
    assert forwards == [*prefills, *prefills, ("decode", 9), ("decode", 4)]
    cached = [{s.cached_len for s in b.sequences} for b in device.batches[: 2 * len(prefills)]]
    assert cached == [{0}] * len(prefills) + [{1}] * len(prefills)
    assert len(device.batches[len(prefills) - 1].logits_rows()) == MAX_PREFILL_BATCH_SIZE
    # Shallow runs: multiples of the step, and batch sizes with kernels of their own.
    layers = [(b.mode, b.num_tokens) for b in device.shallow_batches]
    steps = [("decode", n) for n in (1, 2, 4, 8)]
    assert layers == [*(("prefill", n) for n in (64, 128, 192, 256)), *steps] and not prefill_sizes
    assert memory.forward == 300 * MIB
    # Three sizes, all tried, and page tables of 4 sequences with 4 pages each.
    assert device.num_captured == 1 and memory.graphs == 4 * MIB + 34 * MIB // 3 * 3 + 4 * 4 * 4
    assert (memory.total, memory.free, memory.weights) == (2000 * MIB, device.free, 1000 * MIB - device.free)


def test_dry_run_tokens_differ_as_those_of_requests(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal tokens would choose the same experts, and take less time and memory."""
    engine = build(model_dir, 1)
    device = FakeDevice(monkeypatch, engine)
    config = EngineConfig(model_dir, max_chunk_tokens=64, max_batch_size=9, cuda_graph_max_bs=0)
    measure_memory(engine, config, 1000 * MIB, None, None, None)
    vocab_size = engine.model.config.vocab_size
    for batch in device.batches:
        ids = batch.known_ids()
        assert len({*ids}) >= min(len(ids), vocab_size // 2) and max(ids) < vocab_size


def test_dry_run_prompts_fit_the_model(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(model_dir, 1)
    device = FakeDevice(monkeypatch, engine, computes=False)
    config = EngineConfig(model_dir, max_chunk_tokens=64 * 200 + 1, max_batch_size=0, cuda_graph_max_bs=0)
    assert measure_memory(engine, config, 1000 * MIB, None, None, None).memory.graphs == 0
    batch = device.batches[-1]
    assert batch.num_tokens == 64 * 200 + 1 and max(s.length for s in batch.sequences) <= 64


def test_prefill_graph_memory_is_estimated_from_the_largest(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(model_dir, 1)
    device = FakeDevice(monkeypatch, engine)
    bound = tuple(range(16, 161, 16))
    monkeypatch.setattr(dry_run, "launch_bound_sizes", lambda engine, trials, max_tokens, **by: bound)
    tried = []

    class Captured:
        """Takes 5 MiB per size and 40 MiB shared."""

        def __init__(self, sizes: Sequence[int]) -> None:
            tried.append(tuple(sizes))
            self._taken = 40 * MIB + 5 * MIB * len(sizes)
            device.free -= self._taken

        def __del__(self) -> None:
            device.free += self._taken

    config = EngineConfig(model_dir, max_chunk_tokens=64, max_batch_size=0, cuda_graph_max_bs=0)
    memory, sizes, *_ = measure_memory(engine, config, 1000 * MIB, None, Captured, None)
    assert sizes == bound and tried == [bound[-6:]]
    # Enough for ten graphs, and at most twice as much.
    assert 90 * MIB <= memory.graphs <= 180 * MIB and memory.free == 900 * MIB


def test_large_graphs_follow_the_largest_short_ones(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(model_dir, 1)
    FakeDevice(monkeypatch, engine, computes=False)
    monkeypatch.setattr(
        dry_run, "launch_bound_large_sizes", lambda engine, trials, max_tokens, **by: (4096, max_tokens)
    )
    config = EngineConfig(model_dir, max_chunk_tokens=5000, max_batch_size=0, cuda_graph_max_bs=0, max_model_len=64)
    tried: list[Sequence[int]] = []

    def measured(*short_sizes: int) -> Measured:
        monkeypatch.setattr(dry_run, "launch_bound_sizes", lambda engine, trials, max_tokens, **by: short_sizes)
        return measure_memory(
            engine, config, 1000 * MIB, None, lambda sizes: None, None, capture_large=lambda sizes: tried.append(sizes)
        )

    assert measured(16, 1024).large_sizes == () and not tried
    both = measured(16, 2048)
    # Page tables of as many prompts as a prefill has at most, with 4 pages each.
    assert both.large_sizes == (4096, 5000) == tried[0] and both.memory.graphs == 4 * MAX_PREFILL_BATCH_SIZE * 4


def test_mixed_graph_memory_is_estimated_from_a_few(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(model_dir, 1)
    device = FakeDevice(monkeypatch, engine)
    monkeypatch.setattr(dry_run, "launch_bound_sizes", lambda engine, trials, max_tokens, **by: (16, 64))
    tried = []

    class Captured:
        """Takes 5 MiB per graph and 40 MiB shared."""

        def __init__(self, sizes: MixedSizes) -> None:
            tried.append(sizes)
            self._taken = 40 * MIB + 5 * MIB * len(sizes.pairs())
            device.free -= self._taken

        def __del__(self) -> None:
            device.free += self._taken

    config = EngineConfig(
        model_dir, max_chunk_tokens=256, max_batch_size=64, cuda_graph_max_bs=64, max_model_len=64, mixed_steps=True
    )
    measured = measure_memory(engine, config, 1000 * MIB, None, lambda sizes: None, Captured)
    # Up to the first that fits twice the largest prefill graph.
    assert measured.mixed_sizes == MixedSizes(((16, (112, 176)), (32, (96, 160)), (64, (64, 128))))
    monkeypatch.setattr(dry_run, "launch_bound_sizes", lambda engine, trials, max_tokens, **by: (16, 128))
    tried.clear()
    measured = measure_memory(engine, config, 1000 * MIB, None, lambda sizes: None, Captured)
    beside = (112, 176, 240, 304), (96, 160, 224, 288), (64, 128, 192, 256)
    assert measured.mixed_sizes == MixedSizes(tuple(zip((16, 32, 64), beside, strict=True)))
    assert tried == [MixedSizes(((16, (304,)), (32, (288,)), (64, (256,)))), MixedSizes(((64, (256,)),))]
    # Twelve graphs, and page tables of 64 sequences and 16 prompts with 4 pages each.
    assert measured.memory.graphs == 100 * MIB + 4 * 80 * 4


def test_without_prefill_graphs_there_are_no_mixed_ones(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(model_dir, 1)
    FakeDevice(monkeypatch, engine)
    monkeypatch.setattr(dry_run, "launch_bound_sizes", lambda engine, trials, max_tokens, **by: ())
    config = EngineConfig(model_dir, max_chunk_tokens=64, max_batch_size=4, cuda_graph_max_bs=4, mixed_steps=True)
    measured = measure_memory(engine, config, 1000 * MIB, None, lambda sizes: None, lambda sizes: pytest.fail("tried"))
    assert not measured.mixed_sizes.pairs() and measured.memory.graphs == 0


def test_steps_with_drafts_are_measured(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(model_dir, 1)
    device = FakeDevice(monkeypatch, engine)
    tried = []

    def capture(sizes: Sequence[int]) -> object:
        tried.append(sizes)
        return object()

    config = EngineConfig(
        model_dir, max_chunk_tokens=0, max_batch_size=9, max_drafts=7, cuda_graph_max_bs=9, max_model_len=64
    )
    measured = measure_memory(engine, config, 1000 * MIB, None, None, None, capture)
    largest = device.batches[-1]
    assert (largest.num_tokens, len(largest.sequences)) == (72, 9) and measured.memory.forward == 72 * MIB
    assert {batch.num_tokens for batch in device.shallow_batches if batch.num_drafts} == {*DRAFT_ROWS[:-4]}
    # The largest of the sizes up to 96, and page tables of 96 sequences with 4 pages each.
    assert tried == [(16, 24, 32, 48, 64, 96)] and measured.memory.graphs == 4 * 96 * 4
    # A worker without decode steps has none.
    measured = measure_memory(engine, replace(config, max_batch_size=0), 1000 * MIB, None, None, None, capture)
    assert len(tried) == 1 and measured.memory.graphs == 0
    measured = measure_memory(engine, config, 1000 * MIB, None, None, None, capture_passes=capture)
    # The largest of the sizes up to 16 sequences.
    assert tried[1:] == [(1, 2, 4, 8, 16)] and measured.memory.graphs == 4 * 16 * 4
    engine.max_drafts = 0
    device.batches.clear()
    measure_memory(engine, config, 1000 * MIB, None, None, None)
    assert not any(batch.num_drafts for batch in device.batches)


# --- launch-bound prefills ---

LAUNCH_S = 0.010
TRIALS = TrialBatches(replace(LLAMA_8B, max_position_embeddings=10_000))
SHORT_TRIALS = TrialBatches(replace(LLAMA_8B, max_position_embeddings=300))


class Device(EngineBase):
    """A launch and a token take the host and the device given times."""

    def __init__(
        self,
        clock: FakeClock,
        token_s: float,
        held_up: Callable[[int], float] = lambda number: 0.0,
        launch_s: float = LAUNCH_S,
    ) -> None:
        """Args: held_up: extra seconds of waiting for the numbered forward pass."""
        super().__init__(CpuKvPool(OpaqueLayout(4, 32), 1, "launch-bound"))
        self._clock = clock
        self._token_s = token_s
        self._held_up = held_up
        self._launch_s = launch_s
        self._num_forwards = 0
        self.prompt_lens: list[int] = []

    def forward(self, batch: Batch, meanwhile: Callable[[], None] | None = None) -> ForwardOutput:
        self.prompt_lens += [s.length for s in batch.sequences]
        output = FakeEngine(len(batch.sequences[0].page_ids), 4).forward(batch)
        ends = self._clock() + batch.num_tokens * self._token_s
        self._clock.advance(self._launch_s)
        token_ids = output.token_ids
        held_up_s = self._held_up(self._num_forwards)
        self._num_forwards += 1

        def wait() -> list[int]:
            self._clock.advance(max(0.0, ends - self._clock()) + held_up_s)
            return token_ids()

        output.token_ids = wait  # type: ignore[method-assign]
        return output


@pytest.mark.parametrize(
    ("token_s", "largest"),
    [(LAUNCH_S / 1e6, 2048), (LAUNCH_S / 1024, 1024), (LAUNCH_S / 500, 512), (LAUNCH_S / 400, 256), (LAUNCH_S, 0)],
)
def test_graphs_cover_launch_bound_sizes(token_s: float, largest: int) -> None:
    clock = FakeClock()
    sizes = launch_bound_sizes(Device(clock, token_s), TRIALS, 8192, clock)
    assert max(sizes, default=0) == largest
    assert sizes == tuple(size for size in SIZES if size <= largest)


@pytest.mark.parametrize(
    ("tokens_per_launch", "sizes"), [(10_000, (4096, 8192)), (1500, (4096, 8192)), (1000, (4096,)), (600, ())]
)
def test_large_prefills_of_slow_models_have_no_graphs(tokens_per_launch: int, sizes: tuple[int, ...]) -> None:
    clock = FakeClock()
    device = Device(clock, LAUNCH_S / tokens_per_launch)
    assert launch_bound_large_sizes(device, TRIALS, 8192, clock) == (512, 1024, 2048, *sizes)
    assert all(size <= LARGE_LAUNCH_BOUND * tokens_per_launch for size in sizes)
    assert max(device.prompt_lens) == 512


@pytest.mark.parametrize("when", range(2))
def test_occasional_host_delays_do_not_prevent_graphs(when: int) -> None:
    clock = FakeClock()
    device = Device(clock, LAUNCH_S / 500, lambda number: LAUNCH_S if number % 2 == when else 0.0)
    assert max(launch_bound_sizes(device, TRIALS, 8192, clock), default=0) == 512


def test_no_graph_is_larger_than_the_largest_forward() -> None:
    clock = FakeClock()
    assert max(launch_bound_sizes(Device(clock, 0.0), TRIALS, 300, clock)) == 256


def test_timed_prompts_fit_the_model() -> None:
    clock = FakeClock()
    device = Device(clock, 0.0)
    # Graphs may be larger, because they hold several prompts.
    assert max(launch_bound_sizes(device, SHORT_TRIALS, 8192, clock)) == 2048
    assert max(device.prompt_lens) <= 300 and sum(device.prompt_lens[-7:]) == 2048


def test_graph_sizes_of_all_ranks_follow_the_slowest_launch() -> None:
    """Ranks with other sizes would wait for each other forever."""

    def sizes(group: ThreadGroup, _: ThreadCollectives) -> tuple[int, ...]:
        clock = FakeClock()
        if group.ranks.is_leader:
            # It waits for the follower's launch, which alone would look like work of the device.
            device = Device(clock, 0.0, lambda number: 4 * LAUNCH_S)
        else:
            device = Device(clock, 0.0, launch_s=5 * LAUNCH_S)
        return launch_bound_sizes(device, TRIALS, 300, clock, group)

    leader, follower = run_ranks(2, sizes)
    assert leader == follower and max(leader) == 256


def test_memory_of_a_killed_workers_ranks_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [10, 40, 75, 75, 80]
    monkeypatch.setattr(dry_run, "free_bytes", lambda: free.pop(0))
    pauses: list[float] = []
    assert dry_run.settled_free_bytes(pauses.append) == 75
    assert free == [80] and sum(pauses) == 1.5
