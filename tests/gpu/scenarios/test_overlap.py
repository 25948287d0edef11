"""Overlapping forward passes on a GPU: the same tokens as sequential steps, without waiting for the device."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import grammar_from

from tandem.both_worker.local_worker import LocalWorker
from tandem.both_worker.scheduler import BothScheduler
from tandem.decode_worker.config import DecodeConfig
from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.output import ForwardOutput
from tandem.messages import Finished, FirstToken, Progress, Tokens, WorkerMessage
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams
from tests.cluster.conftest import VOCAB_SIZE
from tests.fakes.stand_in import stands_in_for

# About 5 ms on an H100 or H200.
DEVICE_CYCLES = 9_000_000
TIMEOUT_S = 60.0
# Number of requests that arrive after each number of decode steps; prompt and output lengths vary.
ARRIVALS = {0: 3, 1: 1, 5: 2, 17: 1, 18: 3, 40: 1}
# Never complete, so these outputs end by their lengths.
GRAMMAR: dict[str, Any] = {
    "grammar": grammar_from("regex", "([a-z ]{1,8}[0-9]{2}[,;]){1000}"),
    "stop_token_ids": (256,),
}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "repetition_penalty": 1.2, "num_logprobs": 2}
SAMPLINGS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}],
    "penalties": [{"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2}],
    "sampled": [SAMPLED],
    "grammar": [GRAMMAR],
    "grammar here and there": [{}, GRAMMAR | SAMPLED, SAMPLED],
}


@pytest.fixture(scope="module", params=["graphs", "small graphs", "single launches", "quantized pages", "float32"])
def engine(request: pytest.FixtureRequest, model_dir: Path) -> Engine:
    """Small graphs, so that some batches outgrow them and later return to them."""
    config = EngineConfig(
        str(model_dir),
        device="cuda",
        dtype="float32" if request.param == "float32" else "bfloat16",
        num_pages=400,
        cuda_graph_max_bs={"graphs": 16, "small graphs": 4, "quantized pages": 4}.get(request.param, 0),
        kv_cache_dtype="fp8_e4m3" if request.param == "quantized pages" else "auto",
    )
    return build_engine(config, "test", lambda doing: None)


class JoiningInFlight(BothScheduler):
    """Take requests over while a step is in flight, as a decode worker does."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._adopt = self._decode.adopt
        self._handed_over: list[Callable[[], None]] = []

        def adopt(*args: Any, **kwargs: Any) -> None:
            self._handed_over.append(partial(self._adopt, *args, **kwargs))

        self._decode.adopt = adopt  # type: ignore[method-assign]

    def step(self) -> bool:
        handed_over, self._handed_over = self._handed_over, []
        for adopt in handed_over:
            adopt()
        return super().step() or bool(handed_over)


class Served:
    """A worker of role both over an engine.

    Attributes:
        tokens: decoded tokens by request.
        first_tokens: prefilled tokens by request.
        num_prefills: launched prefill forward passes.
        batches: (sequences, sequences with a device-fed token) of each decode step.
        num_ended: requests with all their tokens.
    """

    def __init__(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch, *, overlap: bool, chunk_size: int = 4096
    ) -> None:
        # An earlier worker on this engine may have left a step in flight.
        engine.launches.collect_all_but(0)
        prefill, decode = PrefillConfig(chunk_size, overlap=overlap), DecodeConfig(overlap=overlap)
        self.worker = LocalWorker(engine, prefill, decode, self._receive)
        self.tokens: dict[str, list[int]] = {}
        self.first_tokens: dict[str, int] = {}
        self.num_prefills = 0
        self.batches: list[tuple[int, int]] = []
        self.num_ended = 0
        forward = Engine.forward

        @stands_in_for(Engine.forward)
        def recorded(engine: Engine, batch: Batch, meanwhile: Callable[[], None] | None = None) -> ForwardOutput:
            if batch.mode == "decode":
                rows = batch.feed.rows if batch.feed else ()
                self.batches.append((len(batch.sequences), sum(row >= 0 for row in rows)))
            else:
                self.num_prefills += 1
            return forward(engine, batch, meanwhile)

        monkeypatch.setattr(Engine, "forward", recorded)

    def submit(self, name: str, prompt_ids: list[int], sampling: SamplingParams) -> None:
        self.tokens[name] = []
        # Runs share no prefix through the pool.
        self.worker.submit(name, prompt_ids, sampling, arrival_ns=len(self.tokens))

    def turn_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, "no progress"
            self.worker.step()

    def _receive(self, message: WorkerMessage) -> None:
        if isinstance(message, Tokens):
            for event in message.events:
                assert event.index == len(self.tokens[event.request_id])
                self.tokens[event.request_id] += event.token_ids
        elif isinstance(message, FirstToken):
            self.first_tokens[message.request_id] = message.token_id
            self.num_ended += bool(message.finish_reason)
        elif isinstance(message, Finished):
            self.num_ended += 1
        else:
            assert isinstance(message, Progress)


def serve_arrivals(served: Served, samplings: Sequence[dict[str, Any]]) -> None:
    """Submit requests while others run, each before a fixed step."""
    rng = random.Random(0)
    for num_steps, num_requests in ARRIVALS.items():
        served.turn_until(lambda num_steps=num_steps: len(served.batches) >= num_steps)
        for _ in range(num_requests):
            prompt = rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 90))
            number = len(served.tokens)
            sampling = SamplingParams(rng.randint(30, 80), **samplings[number % len(samplings)])
            served.submit(f"r{number}", prompt, sampling)
    served.turn_until(lambda: served.num_ended == len(served.tokens))
    served.turn_until(lambda: served.worker.scheduler.stats().num_locked_pages == 0)
    assert served.worker.scheduler.check_integrity() == ""


@pytest.mark.parametrize("scheduler", [BothScheduler, JoiningInFlight])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_overlap_changes_no_token(
    engine: Engine, sampling: str, scheduler: type[BothScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        # Compiles the grammars: requests that wait for one would join another step in the first run.
        served = Served(engine, patch, overlap=False)
        for number, parameters in enumerate(SAMPLINGS[sampling]):
            served.submit(f"first{number}", [number + 1], SamplingParams(2, **parameters))
        served.turn_until(lambda: served.num_ended == len(served.tokens))
    runs = []
    for overlap in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr("tandem.both_worker.worker.BothScheduler", scheduler)
            runs.append(Served(engine, patch, overlap=overlap))
            serve_arrivals(runs[-1], SAMPLINGS[sampling])
    plain, overlapped = runs
    # Equal batches, so rounding is equal.
    assert [size for size, _ in overlapped.batches] == [size for size, _ in plain.batches]
    assert overlapped.tokens == plain.tokens
    assert not any(num_fed for _, num_fed in plain.batches)
    assert sum(num_fed > 0 for _, num_fed in overlapped.batches) > len(overlapped.batches) / 2
    # A worker of role both knows all tokens before a request joins.
    joined_in_flight = any(0 < num_fed < size for size, num_fed in overlapped.batches)
    assert joined_in_flight == (scheduler is JoiningInFlight)


def test_a_stop_token_ends_the_output_where_it_does_without_overlap(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = random.Random(1).choices(range(VOCAB_SIZE), k=40)

    def serve(*stop_token_ids: int) -> list[int]:
        # Each run has its own cache: a cached prefix is rounded differently.
        with monkeypatch.context() as patch:
            served = Served(engine, patch, overlap=True)
            served.submit("r", prompt, SamplingParams(30, stop_token_ids=stop_token_ids))
            served.turn_until(lambda: served.num_ended == 1)
            return served.tokens["r"]

    whole = serve()
    stop = whole[15]
    assert serve(stop) == whole[: whole.index(stop) + 1]


@pytest.fixture
def refuse_to_wait() -> Iterator[Callable[[], None]]:
    """Make torch raise instead of waiting for the device."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("sampling", [{}, GRAMMAR], ids=["free", "grammar"])
def test_steady_decode_waits_only_for_tokens(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, refuse_to_wait: Callable[[], None], sampling: dict[str, Any]
) -> None:
    if engine.model.dtype is torch.float32:
        pytest.skip("the reference backend copies from the host and waits")
    rng = random.Random(2)
    with monkeypatch.context() as patch:
        served = Served(engine, patch, overlap=True)
        for i in range(4):
            served.submit(f"r{i}", rng.choices(range(VOCAB_SIZE), k=20), SamplingParams(120, **sampling))
        served.turn_until(lambda: len(served.batches) == 20)
        refuse_to_wait()
        served.turn_until(lambda: len(served.batches) == 100)
        torch.cuda.set_sync_debug_mode("default")
        served.turn_until(lambda: served.num_ended == 4)
    assert served.batches[20:100] == [(4, 4)] * 80


def test_overlapping_prefills_change_no_token(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for overlap in (False, True):
        rng = random.Random(3)
        with monkeypatch.context() as patch:
            # Nothing is decoded, so that prefills overlap.
            served = Served(engine, patch, overlap=overlap, chunk_size=48)
            for i, length in enumerate((300, 20, 48, 7, 500, 96)):
                served.submit(f"r{i}", rng.choices(range(VOCAB_SIZE), k=length), SamplingParams(1))
            served.turn_until(lambda served=served: served.num_ended == 6)
            served.turn_until(lambda served=served: served.worker.scheduler.stats().num_locked_pages == 0)
            assert served.worker.scheduler.check_integrity() == ""
        runs.append((served.first_tokens, served.num_prefills))
    assert runs[0] == runs[1]


def test_a_prefill_is_launched_without_waiting(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, refuse_to_wait: Callable[[], None]
) -> None:
    if engine.model.dtype is torch.float32:
        pytest.skip("the reference backend copies from the host and waits")
    with monkeypatch.context() as patch:
        served = Served(engine, patch, overlap=True, chunk_size=16)
        served.submit("r", random.Random(4).choices(range(VOCAB_SIZE), k=480), SamplingParams(1))
        served.turn_until(lambda: served.num_prefills == 5)
        refuse_to_wait()
        served.turn_until(lambda: served.num_prefills == 25)
        torch.cuda.set_sync_debug_mode("default")
        served.turn_until(lambda: served.num_ended == 1)


def test_step_reports_device_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.is_asynchronous
    durations = []
    forward = Engine.forward

    @stands_in_for(Engine.forward)
    def timed(engine: Engine, batch: Batch, meanwhile: Callable[[], None] | None = None) -> ForwardOutput:
        started = time.perf_counter()
        output = forward(engine, batch, meanwhile)
        duration_s = output.duration_s()
        durations.append(0.0 < duration_s <= time.perf_counter() - started)
        return output

    with monkeypatch.context() as patch:
        served = Served(engine, patch, overlap=False)
        patch.setattr(Engine, "forward", timed)
        served.submit("r", [1, 2, 3], SamplingParams(10))
        served.turn_until(lambda: served.num_ended == 1)
    assert len(durations) == 10 and all(durations)


@pytest.mark.parametrize("graphs", [0, 16])
def test_mixed_steps_are_launched_without_waiting_and_feed_each_other(
    model_dir: Path, graphs: int, monkeypatch: pytest.MonkeyPatch, refuse_to_wait: Callable[[], None]
) -> None:
    """Four sequences get a token with each chunk of a long prompt; decode steps before and after run as graphs."""
    config = EngineConfig(
        str(model_dir),
        device="cuda",
        dtype="bfloat16",
        num_pages=400,
        cuda_graph_max_bs=graphs,
        prefill_cuda_graphs=False,
        mixed_steps=True,
    )
    engine = build_engine(config, "test", lambda doing: None)
    modes: list[tuple[str, bool]] = []
    forward = Engine.forward

    @stands_in_for(Engine.forward)
    def recorded(engine: Engine, batch: Batch, meanwhile: Callable[[], None] | None = None) -> ForwardOutput:
        modes.append((batch.mode, batch.feed is not None))
        # Otherwise this small model's pass would end before the next is composed, on a busy host too.
        torch.cuda._sleep(4 * DEVICE_CYCLES)
        return forward(engine, batch, meanwhile)

    rng = random.Random(5)
    prompts = [rng.choices(range(VOCAB_SIZE), k=20) for _ in range(4)]
    with monkeypatch.context() as patch:
        served = Served(engine, patch, overlap=True, chunk_size=16)
        patch.setattr(Engine, "forward", recorded)
        for i, prompt in enumerate(prompts):
            served.submit(f"r{i}", prompt, SamplingParams(100, num_logprobs=0))
        served.turn_until(lambda: min(map(len, served.tokens.values())) >= 10)
        modes.clear()
        served.submit("long", rng.choices(range(VOCAB_SIZE), k=480), SamplingParams(5))
        served.turn_until(lambda: len(modes) == 5)
        refuse_to_wait()
        served.turn_until(lambda: len(modes) == 25)
        torch.cuda.set_sync_debug_mode("default")
        served.turn_until(lambda: served.num_ended == 5)
        served.turn_until(lambda: served.worker.scheduler.stats().num_locked_pages == 0)
    assert modes[1:25] == [("mixed", True)] * 24
    assert ("decode", True) in modes[25:]
    assert all(len(served.tokens[f"r{i}"]) == 100 for i in range(4)) and len(served.tokens["long"]) == 5
    assert served.worker.scheduler.check_integrity() == ""
