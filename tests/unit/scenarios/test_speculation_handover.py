"""Speculation on a decode worker behind a prefill worker: outputs are those of one worker without it."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.decode_worker.config import DecodeConfig
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.messages import Finished, FirstToken, NamespaceOwners, ResetCache, TokenEvent, Tokens
from tandem.sampling_params import SamplingParams
from tandem.worker.events import FromRouter
from tests.cluster.conftest import save_tiny_model
from tests.fakes.scripted_drafter import scripted
from tests.fakes.workers import WorkerPair
from tests.unit.scenarios.test_speculation import ENDS, GRAMMARS, NUM_PAGES, PAGE_SIZE, Request, Requests, draw_weights

PROMPT = [7, 3, 9, 7, 3, 9, 7, 1, 4]
MAX_DRAFTS = 4
SAMPLED = SamplingParams(20, temperature=0.9, seed=11)
SAMPLINGS = {
    "greedy": SamplingParams(20, repetition_penalty=1.4),
    "sampled": replace(SAMPLED, frequency_penalty=0.9, logit_bias=((5, 6.0), (9, -100.0))),
    "logprobs": replace(SAMPLED, num_logprobs=3),
    "grammar": replace(SAMPLED, grammar=GRAMMARS[2], stop_token_ids=ENDS, num_logprobs=0),
    "stops": replace(SAMPLED, stop_token_ids=tuple(range(0, 200, 7)), min_tokens=6),
    "another": replace(SAMPLED, seed=12),
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """Of the prefill and the decode worker, with equal weights."""
    path: Path = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_model(path)
    config = EngineConfig(str(path), num_pages=NUM_PAGES, page_size=PAGE_SIZE, num_threads=1)
    engines = [build_engine(config, f"handover-{number}", lambda doing: None) for number in range(2)]
    for engine in engines:
        draw_weights(engine, 5)
    yield engines
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def alone(engines: list[Engine]) -> dict[str, Request]:
    requests = Requests({name: Request(PROMPT, sampling) for name, sampling in SAMPLINGS.items()})
    requests.run(engines[1], DecodeConfig(), NUM_PAGES - PAGE_SIZE)
    return requests


class Pair(WorkerPair):
    def __init__(self, engines: list[Engine], decode: DecodeConfig) -> None:
        prefill = {"engine": engines[0], "num_pages": NUM_PAGES}
        super().__init__(page_size=PAGE_SIZE, prefill=prefill, engine=engines[1], num_pages=NUM_PAGES, config=decode)

    def turn(self) -> bool:
        return any([self.p.scheduler.step(), self.d.scheduler.step(), self.deliver()])

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Turns while nothing happens wait for grammars."""
        until = time.monotonic() + 60
        while not is_done():
            assert time.monotonic() < until
            self.turn()

    def run_all(self, count: int) -> None:
        self.run_until(lambda: len(self.d.outbox.of(Finished)) == count)
        self.run_until(lambda: not self.turn())

    def check_outputs(self, alone: dict[str, Request], attempt: int = 0, num_known: int = 0) -> None:
        events: list[TokenEvent] = [e for m in self.d.outbox.of(Tokens) for e in m.events]
        ends = {m.request_id: m.finish_reason for m in self.d.outbox.of(Finished)}
        for name, request in alone.items():
            assert self.output(name, attempt) == request.token_ids[num_known:], name
            assert ends[name] == request.finish_reason
            probabilities = [p.logprob for e in events if e.request_id == name for p in e.logprobs]
            assert probabilities == pytest.approx(request.logprobs[num_known:], abs=1e-4)
        self.check_idle()


@pytest.mark.parametrize("num_known", [0, 3], ids=["first_attempt", "another_attempt"])
def test_outputs_are_those_of_one_worker(engines: list[Engine], alone: dict[str, Request], num_known: int) -> None:
    known = [request.prompt_ids + request.token_ids for request in alone.values()]

    def right_then_wrong(token_ids: Sequence[int], most: int) -> list[int]:
        right = next((ids for ids in known if ids[: len(token_ids)] == token_ids), [])[len(token_ids) :]
        return [*right[: len(token_ids) % (most + 1)], 5, 6, 7, 8][:most]

    with scripted(right_then_wrong, MAX_DRAFTS) as path:
        pair = Pair(engines, DecodeConfig(speculation=path))
        for name, request in alone.items():
            pair.submit_sampled(
                name,
                PROMPT,
                request.sampling,
                output_ids=tuple(request.token_ids[:num_known]),
                attempt=bool(num_known),
            )
        pair.run_all(len(alone))
        pair.check_outputs(alone, bool(num_known), num_known)
    [drafted] = pair.d.scheduler.stats().drafted
    assert drafted.num_tokens > drafted.num_accepted > 10
    assert sum(drafted.num_by_length) == drafted.num_proposals


def test_a_cancelled_request_leaves_no_page_and_changes_no_other(
    engines: list[Engine], alone: dict[str, Request]
) -> None:
    with scripted(lambda token_ids, most: [5, 6, 7, 8][:most], MAX_DRAFTS) as path:
        pair = Pair(engines, DecodeConfig(speculation=path))
        for name, request in alone.items():
            pair.submit_sampled(name, PROMPT, request.sampling)
        pair.submit_sampled("leaves", [*PROMPT, 2], replace(SAMPLED, max_tokens=100))
        pair.run_until(lambda: len(pair.tokens("leaves")) > 2)
        pair.abort("leaves")
        pair.run_all(len(alone))
        pair.check_outputs(alone)


def test_requests_draft_from_outputs_of_the_same_key_only(engines: list[Engine], alone: dict[str, Request]) -> None:
    pair = Pair(engines, DecodeConfig(speculation="ngram", speculation_shared=True))
    pair.d.scheduler.receive(FromRouter(NamespaceOwners(("key", "other"))))
    one = {"another": alone["another"]}

    def accepted(namespace: str) -> int:
        pair.p.outbox.router.clear()
        pair.d.outbox.router.clear()
        pair.submit_sampled("another", PROMPT, one["another"].sampling, cache_namespace=namespace)
        pair.run_all(1)
        assert pair.p.outbox.of(FirstToken)
        pair.check_outputs(one)
        return sum(drafted.num_accepted for drafted in pair.d.scheduler.stats().drafted if drafted.source == "shared")

    assert accepted("key/") == accepted("other/") == 0
    found = accepted("key/")
    assert found > len(one["another"].token_ids) // 2
    pair.d.scheduler.receive(FromRouter(ResetCache()))
    assert accepted("key/") == found
    found = accepted("key/")
    pair.d.scheduler.receive(FromRouter(NamespaceOwners(("other",))))
    assert accepted("key/") == found
