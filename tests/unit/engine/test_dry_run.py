"""What is measured before a GPU's pool is sized."""

from collections.abc import Sequence

import pytest
import torch

from engine import dry_run
from engine.batch import Batch
from engine.build import build_engine
from engine.config import MAX_PREFILL_BATCH_SIZE, EngineConfig
from engine.dry_run import measure_memory
from engine.engine import Engine

MIB = 2**20


def build(model_dir: str, num_pages: int) -> Engine:
    return build_engine(EngineConfig(model_dir, "dummy", num_pages=num_pages), "dry-run", [].append)


class FakeDevice:
    """A GPU's figures. A forward takes a MiB for each of its tokens, a graph 10 MiB for ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
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
        return self._forward(batch)

    def capture(self, batch_size: int) -> object:
        self.num_captured += 1
        # The first of them takes something that the others share.
        self.free -= 4 * MIB + 10 * MIB * len(dry_run.graph_sizes(batch_size))
        return object()


def test_the_largest_forwards_run_on_a_single_page(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(model_dir, 1)
    device = FakeDevice(monkeypatch, engine)
    config = EngineConfig(model_dir, max_chunk_tokens=300, max_batch_size=9, cuda_graph_max_bs=4)
    memory, prefill_sizes = measure_memory(engine, config, 1000 * MIB, device.capture, None)
    # First new prompts, then such as go on.
    prefills = [("prefill", num_tokens) for num_tokens in (*dry_run.SMALL_PREFILLS, 300)]
    forwards = [(b.mode, b.num_tokens) for b in device.batches]
    assert forwards == [*prefills, *prefills, ("decode", 9), ("decode", 4)]
    cached = [{s.cached_len for s in b.sequences} for b in device.batches[: 2 * len(prefills)]]
    assert cached == [{0}] * len(prefills) + [{1}] * len(prefills)
    assert len(device.batches[len(prefills) - 1].logits_rows()) == MAX_PREFILL_BATCH_SIZE
    # A layer has run for multiples of the step.
    assert [b.num_tokens for b in device.shallow_batches] == [128, 256] and not prefill_sizes
    assert memory.forward == 300 * MIB
    # Three sizes, all of which were tried, and 4 sequences of 4 pages in the page tables.
    assert device.num_captured == 1 and memory.graphs == 4 * MIB + 34 * MIB // 3 * 3 + 4 * 4 * 4
    assert (memory.total, memory.free, memory.weights) == (2000 * MIB, device.free, 1000 * MIB - device.free)


def test_no_prompt_of_the_dry_run_is_longer_than_the_model_allows(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(model_dir, 1)
    device = FakeDevice(monkeypatch, engine)
    config = EngineConfig(model_dir, max_chunk_tokens=64 * 200 + 1, max_batch_size=0, cuda_graph_max_bs=0)
    assert measure_memory(engine, config, 1000 * MIB, None, None)[0].graphs == 0
    batch = device.batches[-1]
    assert batch.num_tokens == 64 * 200 + 1 and max(s.length for s in batch.sequences) <= 64


def test_what_prefill_graphs_take_is_estimated_from_the_largest(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(model_dir, 1)
    device = FakeDevice(monkeypatch, engine)
    bound = tuple(range(16, 161, 16))
    monkeypatch.setattr(dry_run, "launch_bound_sizes", lambda engine, max_tokens: bound)
    tried = []

    class Captured:
        """Each size takes 5 MiB, and what they share 40."""

        def __init__(self, sizes: Sequence[int]) -> None:
            tried.append(tuple(sizes))
            self._taken = 40 * MIB + 5 * MIB * len(sizes)
            device.free -= self._taken

        def __del__(self) -> None:
            device.free += self._taken

    config = EngineConfig(model_dir, max_chunk_tokens=64, max_batch_size=0, cuda_graph_max_bs=0)
    memory, sizes = measure_memory(engine, config, 1000 * MIB, None, Captured)
    assert sizes == bound and tried == [bound[-6:]]
    # Enough is kept for ten, and no more than twice as much.
    assert 90 * MIB <= memory.graphs <= 180 * MIB and memory.free == 900 * MIB
