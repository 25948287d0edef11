"""Pages of a worker whose followers lag, when no event wakes the scheduler."""

import pytest

from tandem.decode_worker.scheduler import POLL_S as DECODE_POLL_S
from tandem.prefill_worker.config import PrefillConfig
from tandem.prefill_worker.scheduler import POLL_S
from tests.fakes.engine import FakeForwardOutput
from tests.fakes.workers import WorkerPair


class Followers:
    """Attributes: lag: whether the followers of all workers have completed nothing."""

    lag = False


@pytest.fixture
def followers(monkeypatch: pytest.MonkeyPatch) -> Followers:
    followers = Followers()
    done = FakeForwardOutput.done
    monkeypatch.setattr(FakeForwardOutput, "done", lambda self: done(self) and not followers.lag)
    return followers


def test_a_prefill_worker_polls_until_pages_of_an_aborted_prompt_are_free(followers: Followers) -> None:
    pair = WorkerPair(prefill={"config": PrefillConfig(chunk_size=8)})
    pair.submit("r", list(range(40)))
    followers.lag = True
    pair.turn()
    pair.abort("r")
    pair.turn()
    assert pair.p.scheduler.stats().num_locked_pages
    deadline = pair.p.scheduler.next_deadline()
    assert deadline is not None and deadline <= pair.clock() + POLL_S
    followers.lag = False
    pair.p.scheduler.step()
    assert not pair.p.scheduler.stats().num_locked_pages
    pair.run()
    pair.check_idle()


def test_a_decode_worker_polls_until_pages_of_an_aborted_request_are_free(followers: Followers) -> None:
    pair = WorkerPair()
    pair.submit("r", list(range(10)))
    while not pair.d.scheduler.num_running:
        pair.turn()
    pair.turn()
    followers.lag = True
    pair.turn()
    pair.abort("r")
    pair.turn()
    assert pair.d.scheduler.num_running == 0 and pair.d.scheduler.stats().num_locked_pages
    deadline = pair.d.scheduler.next_deadline()
    assert deadline is not None and deadline <= pair.clock() + DECODE_POLL_S
    followers.lag = False
    pair.d.scheduler.step()
    assert not pair.d.scheduler.stats().num_locked_pages
    pair.run()
    pair.check_idle()
