"""Handover within one worker."""

from tandem.both_worker.local_worker import LocalWorker
from tandem.decode_worker.config import DecodeConfig
from tandem.messages import Abort, Failed, Finished, Prefill, Progress, Tokens, WorkerMessage
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams
from tandem.worker.events import FromRouter
from tests.fakes.engine import FakeEngine, expected_tokens

PROMPT = list(range(10))


def make_worker() -> tuple[LocalWorker, list[WorkerMessage]]:
    said: list[WorkerMessage] = []
    return LocalWorker(FakeEngine(64, 4), PrefillConfig(4), DecodeConfig(), said.append), said


def test_local_handover_copies_nothing() -> None:
    worker, said = make_worker()
    worker.submit("r", PROMPT, SamplingParams(5))
    worker.run_until(lambda: any(isinstance(message, Finished) for message in said), 10.0)
    tokens = [token_id for m in said if isinstance(m, Tokens) for event in m.events for token_id in event.token_ids]
    assert tokens == expected_tokens(PROMPT, 5)
    stats = worker.scheduler.stats()
    assert (stats.num_locked_pages, stats.num_leased_pages, stats.shipped) == (0, 0, ())
    assert worker.scheduler.check_integrity() == ""


def test_request_without_admit_fails_after_prefill() -> None:
    worker, said = make_worker()
    worker.scheduler.receive(FromRouter(Prefill("r", 0, tuple(PROMPT), (), SamplingParams(5), "local")))
    worker.run_until(lambda: any(isinstance(message, Failed) for message in said), 10.0)
    (failed,) = [message for message in said if isinstance(message, Failed)]
    assert failed.reason == "the request is not admitted here"
    assert worker.scheduler.stats().num_locked_pages == 0


def test_abort_during_prefill_ends_the_request_once() -> None:
    worker, said = make_worker()
    worker.submit("r", PROMPT, SamplingParams(5))
    worker.step()
    worker.scheduler.receive(FromRouter(Abort("r", 0)))
    for _ in range(5):
        worker.step()
    stats = worker.scheduler.stats()
    assert (stats.num_running, stats.num_queued, stats.num_locked_pages) == (0, 0, 0)
    assert not [message for message in said if not isinstance(message, Progress)]
