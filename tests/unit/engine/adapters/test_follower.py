"""Adapters on two ranks, which are threads: the follower loads what the leader orders."""

import itertools
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from tandem.adapters import AdapterRef
from tandem.engine.adapters.base import NO_ADAPTER, AdapterError, AdapterLimits, AdapterState
from tandem.engine.adapters.follower import FollowerAdapters, LoadOrder
from tandem.engine.adapters.manager import AdapterManager
from tandem.engine.adapters.peft import read_info
from tandem.engine.adapters.slots import AdapterSlots
from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.batch import Batch
from tandem.engine.collectives.base import Collectives
from tandem.engine.engine import Engine
from tandem.engine.kvcache.page_table import PageTable
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.engine.models.build import build_model
from tandem.engine.models.config import ModelConfig
from tandem.engine.page_layout import page_layout_of
from tandem.engine.ranks.config import SINGLE_RANK
from tandem.engine.ranks.follower import FollowerLoop
from tandem.engine.ranks.progress import Progress
from tandem.engine.ranks.recorder import ForwardRecorder
from tandem.engine.ranks.ring import Ring
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.weights.loader import load_weights
from tests.fakes.adapters import write_adapter
from tests.fakes.rank_threads import ThreadCollectives, ThreadGroup, run_ranks

CPU = torch.device("cpu")
PAGE_SIZE = 4
LIMITS = AdapterLimits(1, 4, 2**20)
DEADLINE_S = 20.0
_names = itertools.count()


class Memory:
    def __init__(self) -> None:
        self.ring = Ring(memoryview(bytearray(Ring.num_bytes(1))), 1, timeout_s=DEADLINE_S)
        self.progress = Progress(memoryview(bytearray(Progress.num_bytes(2))), 2)


def engine_of(model_dir: str, collectives: Collectives | None, memory: Memory) -> Engine:
    config = ModelConfig.from_dir(Path(model_dir))
    model = build_model(config, torch.float32, CPU, collectives)
    ranks = SINGLE_RANK if collectives is None else collectives.ranks
    slots = AdapterSlots(model, LIMITS.max_loras, LIMITS.max_lora_rank, CPU)
    load_weights(model, Path(), "dummy", None, CPU, lambda doing: None)
    layout = page_layout_of(config, PAGE_SIZE, "float32", "auto").shard(ranks.rank, ranks.degree)
    pool = CpuKvPool(layout, 64, f"adapter-ranks-{next(_names)}")
    recorder = None
    if collectives is not None and ranks.is_leader:
        recorder = ForwardRecorder(memory.ring, memory.progress, PAGE_SIZE)
    attention = ReferenceAttention(pool, config.num_q_heads // ranks.degree)
    engine = Engine(model, pool, attention, mixed_steps=True, ranks=recorder, slots=slots)
    if ranks.is_leader:
        engine.adapters = AdapterManager(slots, config, LIMITS, ranks=recorder)
    else:
        engine.follower_adapters = FollowerAdapters(slots, config, LIMITS.host_bytes)
    return engine


def loaded(engine: Engine, info: AdapterRef) -> int:
    assert engine.adapters is not None
    if info.content_hash not in engine.adapters.states():
        engine.adapters.add(info)
    deadline = time.monotonic() + DEADLINE_S
    while (slot := engine.adapters.acquire(info.content_hash)) is None:
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    return slot


def tokens_of(engine: Engine, infos: list[AdapterRef]) -> list[int]:
    """Computes a sequence with each adapter beside one without, in one slot."""
    ids: list[int] = []
    plain = TokenSequence([1, 2, 3, 4, 5], 5, PageTable(range(4)), table_id=1)
    plain.extend(5)
    ids += engine.forward(Batch.of([], [plain])).token_ids()
    plain.complete_extend()
    for number, info in enumerate(infos, 1):
        slot = loaded(engine, info)
        pages = PageTable(range(4 * number, 4 * number + 4))
        sequence = TokenSequence([9, 8, 7, 6, 5, 4], 6, pages, table_id=1 + number, adapter_slot=slot)
        sequence.extend(6)
        plain.token_ids.append(ids[-1])
        plain.extend(1)
        assert plain.adapter_slot == NO_ADAPTER
        ids += engine.forward(Batch.of([plain], [sequence])).token_ids()
        for each in (plain, sequence):
            each.complete_extend()
        sequence.token_ids.append(ids[-1])
        sequence.extend(1)
        ids += engine.forward(Batch.of([sequence], [])).token_ids()
        assert engine.adapters is not None
        engine.adapters.release(info.content_hash)
    return ids


@pytest.fixture
def infos(model_dir: str, tmp_path: Path) -> list[AdapterRef]:
    config = ModelConfig.from_dir(Path(model_dir))
    paths = [write_adapter(tmp_path / str(seed), config, 4, seed=seed, size=2.0) for seed in range(3)]
    return [read_info(path, config, 4) for path in paths]


def test_follower_loads_into_the_same_slots(model_dir: str, infos: list[AdapterRef]) -> None:
    order = [infos[0], infos[1], infos[0], infos[2]]
    single = engine_of(model_dir, None, Memory())
    expected = tokens_of(single, order)
    single.close()
    memory = Memory()

    def run(group: ThreadGroup, collectives: ThreadCollectives) -> list[int]:
        try:
            engine = engine_of(model_dir, collectives, memory)
            if not group.ranks.is_leader:
                FollowerLoop(engine, memory.ring, memory.progress).run()
                return []
            ids = tokens_of(engine, order)
            memory.progress.stop()
            return ids
        except BaseException:
            memory.progress.abort()
            raise

    assert run_ranks(2, run)[0] == expected
    assert len(set(expected)) > 3


def test_adapter_that_a_follower_cannot_load_is_refused(model_dir: str, infos: list[AdapterRef]) -> None:
    memory, info, is_lost = Memory(), infos[0], threading.Event()

    def refusal(engine: Engine) -> str:
        assert engine.adapters is not None
        engine.adapters.add(info)
        # The leader has it in host memory when the files go.
        engine.adapters.prefetch(info.content_hash)
        deadline = time.monotonic() + DEADLINE_S
        while engine.adapters.states()[info.content_hash] is not AdapterState.IN_HOST:
            assert time.monotonic() < deadline
            time.sleep(1e-3)
        shutil.rmtree(info.path)
        is_lost.set()
        with pytest.raises(AdapterError) as raised:
            loaded(engine, info)
        return str(raised.value)

    def run(group: ThreadGroup, collectives: ThreadCollectives) -> str:
        engine = engine_of(model_dir, collectives, memory)
        if group.ranks.is_leader:
            try:
                return refusal(engine)
            finally:
                memory.progress.stop()
        assert is_lost.wait(DEADLINE_S)
        FollowerLoop(engine, memory.ring, memory.progress).run()
        return ""

    assert run_ranks(2, run)[0].startswith(f"adapter {info.path} could not be loaded on another rank")


def test_order_survives_its_encoding() -> None:
    order = LoadOrder(7, 3, "0123456789abcdef" * 2, "/adapters/ä b")
    assert LoadOrder.decode(order.encode()) == order
    assert LoadOrder.decode((1).to_bytes(8, "little") + b"record") is None
