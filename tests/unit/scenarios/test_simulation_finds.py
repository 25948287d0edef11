"""Injected bugs: the simulation must detect each of them in one of its schedules."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tandem.both_worker.scheduler import BothScheduler
from tandem.decode_worker.lease import Lease
from tandem.decode_worker.leases import LeaseBook
from tandem.decode_worker.scheduler import DecodeScheduler
from tandem.decode_worker.step import DecodeStep
from tandem.decode_worker.waiting_leases import WaitingLeases
from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.engine.kvcache.page_ceiling import PageCeiling
from tandem.engine.launch_list import ForwardPart, LaunchList
from tandem.kvtransfer.events import SenderLinkClosed
from tandem.kvtransfer.sender_link import SenderLease, SenderLink
from tandem.messages import Admit, LinkState, Peer
from tandem.peer_union import PeerUnion
from tandem.prefill_worker.forward import PromptChunks
from tandem.prefill_worker.scheduler import PrefillScheduler
from tandem.router.requests.tracker import RequestState, RequestTracker
from tandem.router.resumption import Sealer
from tandem.router.text.output_text import OutputText
from tandem.router.workers.worker import Worker
from tandem.router.workers.worker_registry import WorkerRegistry
from tandem.worker import router_streams
from tandem.worker.control_client import ControlClient
from tandem.worker.events import Event
from tests.fakes.simulation.schedule import run_schedule

# First bytes of tapes in which only routers fail, or everything may fail and events run one by one.
ONLY_ROUTERS_FAIL = b"\0\0"
ALL_MAY_FAIL = b"\1\1"
NUM_SCHEDULES = 3000


def find_violation(beginning: bytes = b"", asynchronous: bool = False, first: int = 0, two_way: bool = False) -> str:
    """Run random schedules until one fails; return its message.

    Args:
        beginning: first bytes of every tape.
        first: number of the first schedule, for bugs that few schedules reach.
        two_way: workers prefill and decode, with links both ways.
    """
    for number in range(first, first + NUM_SCHEDULES):
        data = random.Random(number).randbytes(400)
        try:
            run_schedule(beginning + data[len(beginning) :], asynchronous, two_way)
        except (AssertionError, RuntimeError, ValueError) as error:
            return str(error) or repr(error)
    return ""


def test_a_page_freed_one_step_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug that deferred freeing prevents: pages are freed while copies launched with them still run."""
    original = CacheManager.release_pages
    monkeypatch.setattr(CacheManager, "release_pages", lambda self, handle, after=(): original(self, handle))
    assert find_violation(first=278)


def test_a_dropped_release_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def release(self: SenderLink, lease: SenderLease, *, reported: bool = True) -> None:
        self._leases.pop(lease.lease_id, None)
        self._settling.pop(lease.lease_id, None)

    monkeypatch.setattr(SenderLink, "release_lease", release)
    assert "no progress" in find_violation()


def test_a_commit_before_its_copies_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SenderLink._settle_if_copied

    def settle(self: SenderLink, lease: SenderLease) -> None:
        lease.copies = []
        original(self, lease)

    monkeypatch.setattr(SenderLink, "_settle_if_copied", settle)
    assert find_violation()


def test_pages_freed_during_their_step_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaunchList, "using", without(DecodeStep))
    assert "in flight" in find_violation(asynchronous=True)


def test_pages_freed_during_their_prefill_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaunchList, "using", without(PromptChunks))
    assert "in flight" in find_violation(asynchronous=True)


def without(kind: type[ForwardPart]) -> Any:
    """Return LaunchList.using as if each kind of forward part had its own list."""
    original = LaunchList.using

    def using(self: LaunchList, table_id: int) -> Any:
        launches = self._launches
        self._launches = deque(
            replace(launch, parts=[part for part in launch.parts if not isinstance(part, kind)]) for launch in launches
        )
        try:
            return original(self, table_id)
        finally:
            self._launches = launches

    return using


def test_pages_shipped_during_their_prefill_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages found in the tree may not be computed yet, though another request computes them."""
    original = LaunchList.num_ready

    def num_ready(self: LaunchList, page_ids: Sequence[int]) -> int:
        """Looks only at the forward passes that write the last page."""
        launches = self._launches
        self._launches = deque(launch for launch in launches if launch.written & set(page_ids[-1:]))
        try:
            return original(self, page_ids)
        finally:
            self._launches = launches

    monkeypatch.setattr(LaunchList, "num_ready", num_ready)
    assert "before they are computed" in find_violation(ALL_MAY_FAIL, asynchronous=True, first=890)


def test_duplicates_freed_during_their_prefill_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = CacheManager.cache_pages
    monkeypatch.setattr(CacheManager, "cache_pages", lambda self, *args, after=(): original(self, *args))
    assert "in flight" in find_violation(asynchronous=True)


@pytest.mark.slow
def test_excess_overtaking_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """If overtakes counted per attempt, a request restarted repeatedly would wait forever."""
    original = WaitingLeases.enqueue

    def enqueue(self: WaitingLeases, waiting: Lease, admit: Admit) -> Lease | None:
        last = original(self, waiting, admit)
        waiting.num_overtaken = 0
        return last

    monkeypatch.setattr(WaitingLeases, "enqueue", enqueue)
    assert "overtaken" in find_violation(ALL_MAY_FAIL)


def test_stream_end_that_ends_other_routers_attempts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.decode_worker.scheduler.router_of", OfAnyRouter)
    assert "wrongly" in find_violation(ONLY_ROUTERS_FAIL)


class OfAnyRouter(str):
    def __new__(cls, request_id: str) -> "OfAnyRouter":
        return super().__new__(cls, request_id)

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


def test_stream_end_without_effect_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseBook, "abort_all_attempts_of", lambda self, router: None)
    assert "wrongly" in find_violation()


def test_unreported_stream_end_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlClient, "_end_stream", lambda self: setattr(self, "router", ""))
    assert find_violation(first=20)


def test_an_abort_that_hits_another_router_s_request_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each router numbers its requests from 0, so a number alone is ambiguous."""

    def abort(self: DecodeScheduler, request_id: str, attempt: int) -> None:
        for job in list(self._running):
            if (number_of(job.request_id), job.attempt) == (number_of(request_id), attempt):
                self._end_job(job)
        self._leases.abort_attempt(request_id, attempt)

    def number_of(request_id: str) -> str:
        return request_id.rpartition("-")[2]

    monkeypatch.setattr(DecodeScheduler, "_abort", abort)
    assert "wrongly" in find_violation(ONLY_ROUTERS_FAIL, first=8)


def test_links_chosen_by_the_last_router_alone_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_named(self: PeerUnion, router: str, peers: Sequence[Peer]) -> None:
        self._named = {router: tuple(peers)}

    monkeypatch.setattr(PeerUnion, "set_named", set_named)
    assert "dropped" in find_violation(ONLY_ROUTERS_FAIL)


def test_links_that_end_with_a_router_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.peer_union.KEEP_S", 0.0)
    assert find_violation(ONLY_ROUTERS_FAIL) == "a link is dropped at once"


def test_links_that_a_dead_router_keeps_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerUnion, "forget_router", lambda self, router: None)
    assert find_violation(first=105)


def test_link_reported_to_only_one_router_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = router_streams._by_router

    def by_router(messages: Sequence[Any], routers: Sequence[str]) -> Any:
        told = dict(original(messages, routers))
        for other in routers[1:]:
            told[other] = [message for message in told[other] if not isinstance(message, LinkState)]
        return told

    monkeypatch.setattr(router_streams, "_by_router", by_router)
    assert "without links" in find_violation()


def test_tokens_that_go_to_the_wrong_router_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_streams, "router_of", lambda request_id: "")
    assert "no progress" in find_violation()


def test_a_resumed_output_that_goes_on_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has a token that the next one was not sampled after."""
    original = RequestTracker.begin_attempt

    def begin(self: RequestTracker, *args: Any) -> Any:
        admit, prefill = original(self, *args)
        if not self.attempt and self.output_ids:
            assert admit is not None
            output_ids = (*admit.output_ids[:-1], 1)
            return replace(admit, output_ids=output_ids), replace(prefill, output_ids=output_ids)
        return admit, prefill

    monkeypatch.setattr(RequestTracker, "begin_attempt", begin)
    assert "sampled after" in find_violation()


def test_a_resumed_output_with_another_seed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Sealer.open
    monkeypatch.setattr(Sealer, "open", lambda self, *args: replace(original(self, *args), seed=7))
    assert "sampled after" in find_violation()


def test_text_that_is_sent_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    original = OutputText.replay
    monkeypatch.setattr(OutputText, "replay", lambda self, token_ids, num_characters: original(self, token_ids, 0))
    assert "text" in find_violation()


def test_tokens_of_an_attempt_that_has_ended_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestTracker, "is_current", lambda self, attempt: self.state is RequestState.RUNNING)
    assert find_violation()


def test_load_that_a_dead_router_leaves_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Worker,
        "set_load_elsewhere",
        lambda self, load: setattr(self, "num_assigned", self.num_assigned + load.num_requests),
    )
    assert "counts" in find_violation()


def test_workers_lost_to_a_stopped_router_s_own_silence_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerRegistry, "excuse_silence", lambda self, seconds: None)
    assert "silent" in find_violation(ONLY_ROUTERS_FAIL)


# --- role both ---


def test_sending_epoch_end_taken_by_lease_book_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lease book knows no such epoch, so it frees pages while copies still write to them."""
    original = BothScheduler.receive

    def receive(self: BothScheduler, event: Event) -> None:
        if isinstance(event, SenderLinkClosed):
            event.when_quiet()
        original(self, event)

    monkeypatch.setattr(BothScheduler, "receive", receive)
    assert "written by a sender that has no lease" in find_violation(ALL_MAY_FAIL, first=1841, two_way=True)


def test_pool_filled_by_remote_prompts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers that prefill for each other wait for each other's pages."""
    monkeypatch.setattr(PageCeiling, "fits", lambda self, shared, num_private: True)
    assert "no progress" in find_violation(ONLY_ROUTERS_FAIL, first=255, two_way=True)


def test_pages_shipped_before_their_launch_completes_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LaunchList, "num_ready", lambda self, page_ids: len(page_ids))
    assert "before they are computed" in find_violation(asynchronous=True, two_way=True)


# --- mixed steps ---


@pytest.mark.parametrize(("kind", "first"), [(DecodeStep, 291), (PromptChunks, 278)])
def test_mixed_step_in_one_list_only_is_caught(
    kind: type[ForwardPart], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one list per kind, a mixed step would be missing from the other list, and its pages freed while it runs."""
    original = LaunchList.using

    def using(self: LaunchList, table_id: int) -> Any:
        launches = self._launches
        self._launches = deque(
            replace(launch, parts=[part for part in launch.parts if len(launch.parts) == 1 or isinstance(part, kind)])
            for launch in launches
        )
        try:
            return original(self, table_id)
        finally:
            self._launches = launches

    monkeypatch.setattr(LaunchList, "using", using)
    assert "in flight" in find_violation(asynchronous=True, first=first, two_way=True)


def test_decoding_before_the_prompt_is_computed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its KV is ready for the next step, but its first token is unknown until the forward pass ends."""
    original = PrefillScheduler._note_launched

    def note_launched(self: PrefillScheduler, launched: PromptChunks) -> None:
        original(self, launched)
        for job in launched.handed_over:
            if self._handover.continues_here(job.request):
                job.take_first(1, None, 1)
                self._finish_prefill(job, 1)
                self._handover.advance(job)

    monkeypatch.setattr(PrefillScheduler, "_note_launched", note_launched)
    assert "sampled after" in find_violation(asynchronous=True, two_way=True)
