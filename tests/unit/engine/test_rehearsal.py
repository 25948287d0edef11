"""Trial forward passes beside the loading of weights."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.engine.attention.base import AttentionBackend
from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.kvcache.pool import KvPool
from tandem.engine.models.config import ModelConfig
from tandem.engine.rehearsal import MAX_FEW, Rehearsal, rehearsed_batches, rehearsing
from tandem.engine.trial_batches import DECODE_SIZES

CPU = torch.device("cpu")


def build(model_dir: str) -> Engine:
    return build_engine(EngineConfig(model_dir, load_format="dummy", num_pages=1), "rehearsal", list[str]().append)


def sizes(batches: Iterator[Batch]) -> list[tuple[str, int]]:
    return [(batch.mode, batch.num_tokens) for batch in batches]


def test_threads_share_the_kinds_of_passes(model_dir: str) -> None:
    config = EngineConfig(model_dir, max_chunk_tokens=300, max_batch_size=60, cuda_graph_max_bs=40)
    few, many, prefills = map(sizes, rehearsed_batches(config, ModelConfig.from_dir(Path(model_dir))))
    assert few == [("decode", n) for n in DECODE_SIZES if n <= MAX_FEW] and many == [("decode", 32)]
    assert prefills == [("prefill", n) for n in (256, 192, 128, 64)]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_of_one_role_rehearses_only_that(model_dir: str, role: str) -> None:
    tokens, sequences = (300, 0) if role == "prefill" else (0, 300)
    config = EngineConfig(
        model_dir, max_chunk_tokens=tokens, max_batch_size=sequences, cuda_graph_max_bs=min(sequences, 256)
    )
    parts = rehearsed_batches(config, ModelConfig.from_dir(Path(model_dir)))
    assert {mode for part in parts for mode, _ in sizes(part)} == {role}


def test_each_thread_has_an_engine_and_all_are_awaited(model_dir: str) -> None:
    engine, engines, ran = build(model_dir), list[Engine](), list[int]()
    config = EngineConfig(model_dir, max_chunk_tokens=130, max_batch_size=33, cuda_graph_max_bs=0)

    def make_engine() -> Engine:
        own = engine.shallow()
        engines.append(own)
        own.forward = lambda batch: ran.append(batch.num_tokens)  # type: ignore
        return own

    parts = rehearsed_batches(config, engine.model.config)
    Rehearsal(make_engine, parts, CPU).wait(60.0)
    assert len({id(own) for own in engines}) == len(parts) == 3
    assert sorted(ran) == [1, 2, 4, 8, 16, 32, 64, 128]


@pytest.mark.parametrize(
    ("error", "level"), [(torch.OutOfMemoryError("no memory"), "INFO"), (AttributeError("plan"), "WARNING")]
)
def test_a_failed_rehearsal_only_costs_its_time(error: Exception, level: str, caplog: pytest.LogCaptureFixture) -> None:
    def make_engine() -> Engine:
        raise error

    with caplog.at_level(logging.INFO, "tandem.engine.rehearsal"):
        Rehearsal(make_engine, [[]], CPU).wait(10.0)
    (record,) = caplog.records
    assert record.getMessage().startswith("kernels are compiled after the weights are loaded, because")
    assert record.levelname == level and str(error) in caplog.text


def test_a_pass_that_fails_once_is_repeated(model_dir: str) -> None:
    engine, ran, errors = build(model_dir), list[int](), [TypeError("an integer is required")]

    def forward(batch: Batch) -> None:
        if batch.num_tokens == 4 and errors:
            raise errors.pop()
        ran.append(batch.num_tokens)

    engine.forward = forward  # type: ignore
    config = EngineConfig(model_dir, max_chunk_tokens=0, max_batch_size=9, cuda_graph_max_bs=0)
    Rehearsal(lambda: engine, rehearsed_batches(config, engine.model.config), CPU).wait(10.0)
    assert ran == [1, 2, 4, 8] and not errors


def test_one_thread_may_have_all_steps(model_dir: str) -> None:
    config = EngineConfig(model_dir, max_chunk_tokens=0, max_batch_size=300)
    (steps,) = rehearsed_batches(config, ModelConfig.from_dir(Path(model_dir)), divides_steps=False)
    assert sizes(steps) == [("decode", n) for n in DECODE_SIZES]


def test_no_thread_is_left_if_another_cannot_start(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, threads, start = build(model_dir), list[threading.Thread](), threading.Thread.start
    engine.forward = lambda batch: None  # type: ignore

    def limited(thread: threading.Thread) -> None:
        if threads:
            raise RuntimeError("can't start new thread")
        threads.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    config = EngineConfig(model_dir, max_chunk_tokens=300, max_batch_size=60)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Rehearsal(lambda: engine, rehearsed_batches(config, engine.model.config), CPU)
    assert not threads[0].is_alive()


def test_a_stopped_rehearsal_ends_after_its_batch(model_dir: str) -> None:
    engine, batches = build(model_dir), list[Batch]()
    begun, goes_on = threading.Event(), threading.Event()

    def forward(batch: Batch) -> None:
        batches.append(batch)
        begun.set()
        assert goes_on.wait(10.0)

    engine.forward = forward  # type: ignore
    config = EngineConfig(model_dir, max_chunk_tokens=0, max_batch_size=9, cuda_graph_max_bs=0)
    rehearsal = Rehearsal(lambda: engine, rehearsed_batches(config, engine.model.config)[:1], CPU)
    assert begun.wait(10.0)
    with pytest.raises(TimeoutError, match=r"kernels are not compiled after 0\.01 s"):
        rehearsal.wait(0.01)
    goes_on.set()
    rehearsal.stop()
    assert len(batches) == 1


def test_nothing_is_rehearsed_on_cpus(model_dir: str) -> None:
    engine, told = build(model_dir), list[str]()

    def no_backend(pool: KvPool) -> AttentionBackend:
        raise AssertionError("an engine is made")

    with rehearsing(EngineConfig(model_dir), engine.model, engine.pool.layout, no_backend, CPU, told.append):
        pass
    assert not told
