"""Sampling of a decode step, at its launch or once the previous tokens are known."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tandem.decode_worker.job import DecodeJob
from tandem.decode_worker.step import DecodeStep
from tandem.engine.batch import Batch
from tandem.engine.engine import EngineBase
from tandem.engine.grammars import CompiledGrammar, Constraint
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.engine.output import ForwardOutput
from tandem.engine.token_sequence import TokenSequence
from tandem.prompt_logprobs import PackedLogprobs
from tandem.sampling_params import SamplingParams, TokenLogprobs
from tests.fakes.page_layout import OpaqueLayout


class Output(ForwardOutput):
    """Records the known tokens of each sequence at sampling."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._tokens: list[int] = []
        if not batch.waits_for_tokens:
            self.sample()

    def sample(self) -> None:
        if not self._tokens:
            self._tokens = [len(sequence.token_ids) for sequence in self._batch.sequences]

    def done(self) -> bool:
        return bool(self._tokens)

    def token_ids(self) -> list[int]:
        assert self._tokens
        return self._tokens

    def logprobs(self) -> list[TokenLogprobs | None]:
        return [None] * len(self._tokens)

    def prompt_logprobs(self) -> list[PackedLogprobs | None]:
        return [None] * len(self._tokens)

    def embeddings(self) -> list[bytes | None]:
        return [None] * len(self._tokens)


class Engine(EngineBase):
    def __init__(self) -> None:
        super().__init__(CpuKvPool(OpaqueLayout(4, 32), 4, "step"))

    def forward(self, batch: Batch, meanwhile: Callable[[], None] | None = None) -> ForwardOutput:
        return Output(batch)


def job(constraint: Constraint | None = None) -> DecodeJob:
    handle: Any = None
    sequence = TokenSequence([1, 2, 3], 2, [0], cached_len=2, sampling=SamplingParams(9), constraint=constraint)
    return DecodeJob("r", 0, 0, 0, sequence, handle, 0, [], [], 0, 0, prefill_cached_len=0)


def constraint() -> Constraint:
    matcher: Future[Any] = Future()
    matcher.set_result(None)
    return Constraint(CompiledGrammar("", matcher))


def launch(engine: Engine, jobs: list[DecodeJob], previous: DecodeStep | None) -> DecodeStep:
    step = DecodeStep(jobs, [], previous, lambda step: None, lambda step: None)
    engine.launch(decoded=step)
    return step


def test_tokens_are_sampled_at_launch() -> None:
    engine, free = Engine(), job()
    first = launch(engine, [free], None)
    second = launch(engine, [free], first)
    assert free.sequence.num_pending == 2
    assert [first.collect(), second.collect()] == [[free], [free]]
    assert free.sequence.token_ids == [1, 2, 3, 3, 3]


def test_step_with_a_grammar_samples_once_previous_tokens_are_known() -> None:
    engine, free, kept = Engine(), job(), job(constraint())
    jobs = [free, kept]
    first = launch(engine, jobs, None)
    second = launch(engine, jobs, first)
    assert not second.output.done()
    assert [one.sequence.num_pending for one in jobs] == [1, 1]
    first.collect()
    second.sample()
    second.sample()
    assert [one.sequence.num_pending for one in jobs] == [1, 1]
    assert [one.sequence.length for one in jobs] == [5, 5]
    second.collect()
    assert [one.sequence.token_ids for one in jobs] == [[1, 2, 3, 3, 4]] * 2
    assert [one.sequence.num_pending for one in jobs] == [0, 0]
