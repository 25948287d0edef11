"""Handover from a prefill to a decode worker, over fake engines."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from tandem.decode_worker.config import DecodeConfig
from tandem.engine.batch import Batch
from tandem.engine.grammars import CompiledGrammar, Constraint
from tandem.engine.output import ForwardOutput
from tandem.kvtransfer.events import FromSender, SenderLinkClosed
from tandem.messages import (
    Failed,
    Finished,
    FirstToken,
    LeaseLost,
    LeaseRequest,
    PrefillDeferred,
    ResetCache,
    Revoke,
)
from tandem.prefill_worker.config import PrefillConfig
from tandem.prefill_worker.handover import ASK_AGAIN_S
from tandem.prefill_worker.scheduler import MAX_DOUBLINGS, POLL_S, TELL_S
from tandem.worker.events import FromRouter, RouterLost
from tests.fakes.engine import FakeEngine, expected_tokens
from tests.fakes.transport import ScriptedTransport
from tests.fakes.workers import WorkerPair


def test_tokens_match_the_model() -> None:
    pair = WorkerPair()
    prompts = {f"r{n}": list(range(n, 2 * n)) for n in (1, 3, 4, 5, 8, 17, 40)}
    for request_id, prompt in prompts.items():
        pair.submit(request_id, prompt, max_tokens=6)
    pair.run()
    for request_id, prompt in prompts.items():
        assert pair.output(request_id) == expected_tokens(prompt, 6)
    pair.check_idle()


def test_decode_worker_computes_no_prompt_token() -> None:
    pair = WorkerPair()
    pair.submit("r", list(range(30)), max_tokens=6)
    pair.run()
    assert pair.p.engine.counters.prompt_tokens_computed == 30
    assert pair.d.engine.counters.prompt_tokens_computed == 0
    # Prefill samples the first token, and the last has no KV.
    assert pair.d.engine.counters.output_tokens_computed == 5


def test_lease_is_requested_before_the_prompt_is_computed() -> None:
    pair = WorkerPair()
    flushed_before: list[int] = []
    pair.p.outbox.flush = lambda: flushed_before.append(len(pair.p.engine.batches)) or True  # type: ignore[method-assign]
    pair.submit("r", list(range(10)))
    pair.p.scheduler.step()
    assert isinstance(pair.p.outbox.link[0][1], LeaseRequest)
    assert flushed_before[0] == 0


def test_long_prompts_are_chunked_and_full_pages_ship_after_each_chunk() -> None:
    transport = ScriptedTransport()
    pair = WorkerPair(prefill={"config": PrefillConfig(chunk_size=6)}, open_sender=lambda *_: transport)
    pair.submit("r", list(range(15)))
    pair.p.scheduler.step()
    pair.deliver()
    pair.d.scheduler.step()
    pair.deliver()  # the grant arrives after the first chunk
    assert [len(src) for _, src, _ in transport.pushes] == [1]
    pair.p.scheduler.step()
    assert [len(src) for _, src, _ in transport.pushes] == [1, 2]
    pair.p.scheduler.step()
    # The partial last page ships once, after the last chunk.
    assert [len(src) for _, src, _ in transport.pushes] == [1, 2, 1]
    assert [lens for _, lens in pair.p.engine.batches] == [[6], [6], [3]]
    assert [seq for seq, _, _ in transport.pushes] == [0, 1, 2]


def test_committed_waits_for_the_copies() -> None:
    transport = ScriptedTransport()
    pair = WorkerPair(open_sender=lambda *_: transport)
    pair.submit("r", list(range(10)))
    for _ in range(5):
        pair.turn()
    assert transport.pushes and pair.d.scheduler.num_running == 0
    # Pages stay locked at the sender while copies read them.
    assert pair.p.scheduler.stats().num_locked_pages == 3
    transport.complete_all()
    pair.turn()
    pair.turn()
    assert pair.d.scheduler.num_running == 1
    assert pair.p.scheduler.stats().num_locked_pages == 0


def test_copy_ending_just_after_a_check_is_soon_rechecked() -> None:
    transport = ScriptedTransport()
    pair = WorkerPair(open_sender=lambda *_: transport)
    pair.submit("r", list(range(10)))
    for _ in range(5):
        pair.turn()
    assert transport.pushes
    # The copy was in flight during the step and ends before the thread computes its sleep.
    transport.complete_all()
    deadline = pair.p.scheduler.next_deadline()
    assert deadline is not None and deadline <= pair.clock() + POLL_S
    for _ in range(3):
        pair.turn()
    assert pair.d.scheduler.num_running == 1
    pair.run()
    assert pair.p.scheduler.next_deadline() is None


def test_handover_completes_during_the_next_launch() -> None:
    transport = ScriptedTransport()
    pair = WorkerPair(
        prefill={"config": PrefillConfig(chunk_size=8), "max_pages_in_flight": 2}, open_sender=lambda *_: transport
    )
    pair.submit("a", list(range(12)))
    for _ in range(4):
        pair.turn()
    assert [len(src) for _, src, _ in transport.pushes] == [2]
    pair.submit("b", list(range(100, 108)))
    settled: list[list[str]] = []

    class Launching(FakeEngine):
        """Completes both copies one after the other during a launch."""

        def forward(self, batch: Batch, meanwhile: Callable[[], None] | None = None) -> ForwardOutput:
            assert meanwhile is not None
            for _ in range(2):
                transport.complete_all()
                pair.clock.advance(TELL_S)
                meanwhile()
            settled.append([type(message).__name__ for _, message in pair.p.outbox.link])
            return super().forward(batch)

    pair.p.engine.__class__ = Launching
    pair.p.scheduler.step()
    assert [len(src) for _, src, _ in transport.pushes] == [2, 1]
    assert settled == [["LeaseRequest", "Committed"]]
    for _ in range(6):
        pair.turn()
        transport.complete_all()
    pair.run()
    pair.check_idle()


def test_first_token_is_sent_before_the_forward_s_other_jobs_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.prefill_worker.scheduler.TELL_S", 0.0)
    transport = ScriptedTransport()
    pair = WorkerPair(
        prefill={"config": PrefillConfig(chunk_size=64), "asynchronous": True}, open_sender=lambda *_: transport
    )
    for n in range(3):
        pair.submit(f"r{n}", list(range(100 * n, 100 * n + 8)))
    told: list[int] = []

    def flush() -> bool:
        told.append(len(pair.p.outbox.of(FirstToken)))
        return True

    monkeypatch.setattr(pair.p.outbox, "flush", flush)
    for _ in range(8):
        pair.turn()
        transport.complete_all()
    assert {1, 2, 3} <= set(told)


def test_job_is_not_committed_before_its_result_is_checked() -> None:
    """Pages of "ends" wait for those of "first" in the same pass.

    All may then be pushed before its first token ends it.
    """
    transport = ScriptedTransport()
    prefill = {"config": PrefillConfig(chunk_size=64), "max_pages_in_flight": 3, "asynchronous": True}
    pair = WorkerPair(prefill=prefill, open_sender=lambda *_: transport)
    prefix = list(range(28))
    pair.submit("before", prefix, max_tokens=1)
    for _ in range(12):
        pair.turn()
        transport.complete_all()
    pair.run()
    pair.d.scheduler.receive(FromRouter(ResetCache()))
    pair.submit("first", [500], max_tokens=4)
    pair.submit("ends", [*prefix, 600, 601], max_tokens=1)
    transport.pushes.clear()
    pair.turn()
    pair.turn()
    transport.complete_all()
    pair.p.engine.run_next()
    pair.p.outbox.flush = lambda: transport.complete_all() or True  # type: ignore[method-assign]
    pair.clock.advance(1.0)
    pair.p.scheduler.step()
    # The pages shipped in between were computed earlier; the last page ships with its own job.
    assert [len(src) for _, src, _ in transport.pushes] == [3, 3, 1, 1, 1]
    for _ in range(10):
        pair.turn()
    assert [token.finish_reason for token in pair.p.outbox.of(FirstToken)] == ["length", "", "length"]
    # The transport moves nothing, so tokens are meaningless. Only "first" is decoded.
    assert pair.output("ends") == [] and pair.d.engine.batches == [("decode", [1])] * 3
    pair.check_idle()


def test_second_turn_ships_only_new_pages() -> None:
    pair = WorkerPair()
    first = list(range(16))
    pair.submit("a", first, max_tokens=6)
    pair.run()
    second = [*first, *pair.output("a"), 500, 501, 502]
    (shipped_before,) = pair.p.handover.shipped
    pair.submit("b", second, max_tokens=4)
    pair.run()
    assert pair.output("b") == expected_tokens(second, 4)
    # The decode worker has KV of 21 of 25 tokens, 5 pages of 4; the prefill worker has the first prompt's 16.
    (finished,) = [f for f in pair.d.outbox.of(Finished) if f.request_id == "b"]
    assert (finished.cached_len, finished.num_pages_shipped) == (20, 2)
    (shipped,) = pair.p.handover.shipped
    assert shipped.num_pages - shipped_before.num_pages == 2
    first_token = next(m for m in pair.p.outbox.of(FirstToken) if m.request_id == "b")
    assert (first_token.cached_len, first_token.num_pages_computed) == (16, 3)
    pair.check_idle()


def test_nothing_to_ship_is_legal() -> None:
    pair = WorkerPair()
    prompt = list(range(8))
    for request_id in ("a", "b"):
        pair.submit(request_id, prompt, max_tokens=3)
        pair.run()
    (finished,) = [f for f in pair.d.outbox.of(Finished) if f.request_id == "b"]
    assert (finished.cached_len, finished.num_pages_shipped) == (8, 0)
    assert pair.output("b") == expected_tokens(prompt, 3)


def test_shared_prefixes_use_the_same_pages() -> None:
    pair = WorkerPair(num_pages=24)
    prefix = list(range(40))
    for i in range(4):
        pair.submit(f"r{i}", [*prefix, 600 + i], max_tokens=8)
        pair.run()
    for i in range(4):
        assert pair.output(f"r{i}") == expected_tokens([*prefix, 600 + i], 8)
    pair.check_idle()


def test_first_token_may_end_the_request() -> None:
    pair = WorkerPair()
    prompt = list(range(9))
    (stop,) = expected_tokens(prompt, 1)
    pair.submit("length", prompt, max_tokens=1)
    pair.submit("stop", prompt, max_tokens=9, stop_token_ids=(stop,))
    pair.run()
    assert [m.finish_reason for m in pair.p.outbox.of(FirstToken)] == ["length", "stop"]
    assert pair.d.engine.batches == []
    pair.check_idle()


def test_request_ended_by_first_token_does_not_wait_for_pages() -> None:
    pair = WorkerPair(num_pages=4)
    pair.submit("holder", list(range(11)), max_tokens=5)
    for _ in range(4):
        pair.turn()
    pair.submit("r", list(range(100, 109)), max_tokens=1)
    for _ in range(2):
        pair.turn()
    assert pair.p.scheduler.stats().num_running == 0 and pair.p.outbox.of(Failed) == []
    pair.run()
    assert pair.d.scheduler.next_deadline() is None, "nothing of it is remembered"
    pair.check_idle()


def test_protocol_violation_ends_only_the_link() -> None:
    pair = WorkerPair()
    pair.submit("r", list(range(5)), max_tokens=50)
    for _ in range(4):
        pair.turn()
    for _ in range(2):
        pair.d.scheduler.receive(FromSender(pair.epoch, LeaseRequest("twice", "other", 0, 5)))
    assert "requested twice" in pair.d.outbox.closed[pair.epoch]
    assert pair.d.scheduler.num_running == 1


def test_finished_prefill_is_kept_until_pages_are_free() -> None:
    pair = WorkerPair(num_pages=6)
    pair.submit("a", list(range(16)), max_tokens=4)
    pair.submit("b", list(range(100, 116)), max_tokens=4)
    seen_waiting = False
    for _ in range(40):
        pair.p.scheduler.step()
        pair.d.scheduler.step()
        seen_waiting = seen_waiting or (pair.p.scheduler.num_running == 1 and pair.d.scheduler.stats().num_queued == 1)
        pair.deliver()
        pair.check()
    assert seen_waiting
    assert pair.output("a") == expected_tokens(list(range(16)), 4)
    assert pair.output("b") == expected_tokens(list(range(100, 116)), 4)
    assert pair.p.engine.counters.prompt_tokens_computed == 32
    pair.check_idle()


def test_long_wait_for_pages_defers_the_request_and_keeps_its_cache() -> None:
    pair = WorkerPair(num_pages=5)
    pair.submit("holder", list(range(11)), max_tokens=9)
    for _ in range(4):
        pair.turn()
    pair.submit("r", list(range(100, 116)), max_tokens=2)
    pair.p.scheduler.step()
    pair.deliver()
    pair.d.scheduler.step()
    deadline = pair.p.scheduler.next_deadline()
    assert deadline is not None
    pair.clock.advance(deadline - pair.clock.now)
    pair.p.scheduler.step()
    assert pair.p.outbox.of(PrefillDeferred) == [PrefillDeferred("r", 0)]
    pair.p.scheduler.step()
    assert len(pair.p.outbox.of(PrefillDeferred)) == 1, "it says so once"
    assert pair.p.scheduler.stats().num_running == 1 and pair.d.scheduler.stats().num_queued == 1
    pair.abort("r")
    assert pair.p.scheduler.stats().num_running == pair.d.scheduler.stats().num_queued == 0
    assert len(pair.p.cache.peek(list(range(100, 116)))) == 4
    pair.run()
    pair.check_idle()


def test_a_refused_lease_fails_its_request() -> None:
    pair = WorkerPair(num_pages=3)
    pair.submit("r", list(range(12)))
    pair.run()
    (failed,) = pair.p.outbox.of(Failed)
    assert "too_large" in failed.reason
    pair.check_idle()


@pytest.mark.parametrize("turns", range(8))
def test_abort_at_any_time_frees_every_page(turns: int) -> None:
    pair = WorkerPair(prefill={"config": PrefillConfig(chunk_size=8)})
    pair.submit("r", list(range(30)), max_tokens=50)
    for _ in range(turns):
        pair.turn()
    pair.abort("r")
    pair.run()
    pair.check_idle()


def test_abort_during_a_copy_keeps_pages_until_it_completes() -> None:
    transport = ScriptedTransport()
    pair = WorkerPair(open_sender=lambda *_: transport)
    pair.submit("r", list(range(10)))
    for _ in range(3):
        pair.turn()
    assert transport.pushes
    pair.abort("r")
    for _ in range(3):
        pair.turn()
    assert pair.p.scheduler.stats().num_locked_pages == 3
    assert pair.d.scheduler.stats().num_leased_pages == 3
    transport.complete_all()
    pair.run()
    pair.check_idle()


def test_revoked_lease_is_released_after_its_copies() -> None:
    transport = ScriptedTransport()
    config = DecodeConfig(lease_duration_s=5)
    pair = WorkerPair(open_sender=lambda *_: transport, config=config)
    pair.submit("r", list(range(10)))
    for _ in range(3):
        pair.turn()
    pair.clock.advance(6)
    pair.d.scheduler.step()
    assert [type(m) for _, m in pair.d.outbox.link] == [Revoke]
    assert pair.d.scheduler.stats().num_leased_pages == 3
    assert [m.request_id for m in pair.d.outbox.of(LeaseLost)] == ["r"]
    pair.run()
    assert pair.d.scheduler.stats().num_leased_pages == 3, "its copies still run"
    transport.complete_all()
    pair.run()
    pair.check_idle()


def test_chunks_renew_the_lease() -> None:
    pair = WorkerPair(prefill={"config": PrefillConfig(chunk_size=4)}, config=DecodeConfig(lease_duration_s=5))
    pair.submit("r", list(range(40)), max_tokens=3)
    for _ in range(9):
        pair.turn()
        pair.clock.advance(3)
    pair.run()
    assert pair.output("r") == expected_tokens(list(range(40)), 3)


@pytest.mark.parametrize("turns", range(6))
def test_a_cut_link_loses_the_request_but_no_page(turns: int) -> None:
    pair = WorkerPair(prefill={"config": PrefillConfig(chunk_size=8)})
    pair.submit("r", list(range(30)), max_tokens=50)
    for _ in range(turns):
        pair.turn()
    pair.cut_link()
    pair.turn()
    pair.check()
    running = pair.d.scheduler.num_running
    told = {m.request_id for m in [*pair.p.outbox.of(Failed), *pair.d.outbox.of(LeaseLost)]}
    assert running or told == {"r"}, "somebody must tell the router"
    # The sender's next epoch proves that the old one's copies are complete.
    pair.open_link()
    pair.abort("r")
    pair.run()
    pair.check_idle()


def test_a_request_for_an_unlinked_worker_fails_at_once() -> None:
    pair = WorkerPair()
    pair.cut_link()
    pair.submit("r", list(range(10)))
    pair.p.scheduler.step()
    (failed,) = pair.p.outbox.of(Failed)
    assert "no link" in failed.reason


def test_losing_the_router_ends_everything_on_both_sides() -> None:
    pair = WorkerPair(prefill={"config": PrefillConfig(chunk_size=8)})
    for i in range(4):
        pair.submit(f"r{i}", list(range(i, 30 + i)), max_tokens=50)
    for _ in range(4):
        pair.turn()
    for side in (pair.p, pair.d):
        side.scheduler.receive(RouterLost(""))
    pair.run()
    pair.check_idle()


def test_decode_worker_does_not_repeat_the_prefill_worker_s_report() -> None:
    # The first token ends the request while the grant is on its way. LeaseLost must not overtake FirstToken, which
    # travels on another stream.
    pair = WorkerPair()
    pair.submit("r", list(range(5)), max_tokens=1)
    pair.p.scheduler.step()
    (epoch, request), *_ = pair.p.outbox.link
    pair.d.scheduler.receive(FromSender(epoch, request))
    del pair.p.outbox.link[0]
    pair.d.scheduler.step()
    assert pair.d.scheduler.stats().num_leased_pages == 2
    pair.run()
    (first,) = pair.p.outbox.of(FirstToken)
    assert first.finish_reason == "length"
    assert pair.d.outbox.of(LeaseLost) == []
    pair.check_idle()


def test_decode_worker_reports_for_a_prefill_worker_without_router() -> None:
    pair = WorkerPair(prefill={"config": PrefillConfig(chunk_size=8)})
    pair.submit("r", list(range(30)))
    for _ in range(2):
        pair.turn()
    pair.p.scheduler.receive(RouterLost(""))
    pair.run()
    assert [m.request_id for m in pair.d.outbox.of(LeaseLost)] == ["r"]
    pair.check_idle()


def test_the_cap_on_pages_in_flight_holds_back_pushes_and_the_commit() -> None:
    sender = ScriptedTransport()
    pair = WorkerPair(open_sender=lambda *_: sender, prefill={"max_pages_in_flight": 2})
    pair.submit("r", list(range(20)), max_tokens=3)
    for _ in range(4):
        pair.turn()
    assert [len(src) for _, src, _ in sender.pushes] == [2]
    for _ in range(4):
        sender.complete_all()
        pair.turn()
    assert [len(src) for _, src, _ in sender.pushes] == [2, 2, 1]
    told: list[bool] = []
    pair.p.scheduler.receive(SenderLinkClosed(pair.epoch, "over", lambda: told.append(True)))
    assert told == [True]


def test_only_pushable_pages_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frequent checks of a long prompt must not go through all its pages."""
    sender = ScriptedTransport()
    prefill = {"config": PrefillConfig(chunk_size=16), "max_pages_in_flight": 2, "asynchronous": True}
    pair = WorkerPair(open_sender=lambda *_: sender, prefill=prefill)
    asked: list[int] = []
    launches = pair.p.engine.launches
    num_ready = launches.num_ready

    def ask(page_ids: Sequence[int]) -> int:
        asked.append(len(page_ids))
        return num_ready(page_ids)

    monkeypatch.setattr(launches, "num_ready", ask)
    pair.submit("r", list(range(160)), max_tokens=3)
    pair.run()
    assert pair.p.outbox.of(FirstToken) and len(asked) > 5 and max(asked) == 3
    for _ in range(20):
        sender.complete_all()
        pair.run()
    shipped = [page_id for _, src, _ in sender.pushes for page_id in src]
    assert len(set(shipped)) == len(shipped) == 40


def test_after_a_failure_nothing_is_committed_and_nothing_stays_locked() -> None:
    sender = ScriptedTransport()
    pair = WorkerPair(open_sender=lambda *_: sender)
    pair.submit("r", list(range(10)))
    for _ in range(3):
        pair.turn()
    # The broken transport's copies end without arrival.
    sender.failure_reason = "broken"
    sender.complete_all()
    for _ in range(3):
        pair.turn()
    assert pair.p.outbox.closed == {pair.epoch: "broken"}
    assert pair.d.scheduler.num_running == 0 and pair.p.scheduler.stats().num_running == 1
    pair.cut_link()
    pair.turn()
    assert pair.p.scheduler.stats().num_locked_pages == 0
    assert [m.request_id for m in pair.p.outbox.of(Failed)] == ["r"]


# --- Waiting for pages ---


def test_each_attempt_waits_twice_as_long_as_the_one_before() -> None:
    waits: list[float] = []
    for attempt in (0, 1, 2, 50):
        pair = WorkerPair(prefill={"config": PrefillConfig(grant_timeout_s=10.0)})
        pair.submit("r", list(range(8)), attempt=attempt)
        # Nothing reaches the decode worker, so nothing is granted.
        pair.p.scheduler.step()
        deadline = pair.p.scheduler.next_deadline()
        assert deadline is not None
        waits.append(deadline - pair.clock.now)
    assert waits == [10.0, 20.0, 40.0, 10.0 * 2**MAX_DOUBLINGS]


def test_lease_refused_by_a_full_queue_is_requested_again() -> None:
    pair = WorkerPair(num_pages=5, config=DecodeConfig(max_waiting=1))
    prompts = {name: [number] * 11 for number, name in enumerate(("holder", "waits", "full", "cancelled"))}
    for name, prompt in prompts.items():
        pair.submit(name, prompt, max_tokens=9)
        for _ in range(2):
            pair.turn()
    pair.abort("cancelled")
    assert pair.d.scheduler.stats().num_queued == 1
    for _ in range(60):
        pair.clock.advance(ASK_AGAIN_S)
        pair.turn()
    for name in ("holder", "waits", "full"):
        assert pair.output(name) == expected_tokens(prompts[name], 9)
    assert pair.p.outbox.of(Failed) == pair.p.outbox.of(PrefillDeferred) == []
    pair.check_idle()


@pytest.mark.parametrize("event", ["cut", "first token ends it"])
def test_job_may_end_before_its_next_lease_request(event: str) -> None:
    pair = WorkerPair(num_pages=5, config=DecodeConfig(max_waiting=1), prefill={"config": PrefillConfig(chunk_size=12)})
    for number, name in enumerate(("holder", "waits")):
        pair.submit(name, [number] * 11, max_tokens=9)
        for _ in range(3):
            pair.turn()
    pair.submit("full", [7] * 11, max_tokens=9 if event == "cut" else 1)
    for _ in range(3):
        pair.turn()
    if event == "cut":
        pair.cut_link()
    for _ in range(3):
        pair.turn()
    failed = [m.request_id for m in pair.p.outbox.of(Failed)]
    assert ("full" in failed) == (event == "cut")
    assert not pair.p.handover._asking_again


def test_end_of_an_unknown_epoch_lets_the_next_one_open() -> None:
    pair = WorkerPair()
    told: list[str] = []
    pair.p.scheduler.receive(SenderLinkClosed("of another life", "cut", lambda: told.append("quiet")))
    assert told == ["quiet"]
    pair.submit("r", list(range(5)))
    pair.run()
    assert pair.output("r") == expected_tokens(list(range(5)), 5)


def test_grammar_compiled_just_after_a_step_is_soon_rechecked() -> None:
    pair = WorkerPair()
    matcher: Future[Any] = Future()
    compiled = CompiledGrammar("", matcher)
    pair.d.engine.constraint = lambda grammar, output_ids=(), client="": Constraint(compiled)  # type: ignore[method-assign]
    pair.submit("r", list(range(10)))
    for _ in range(5):
        pair.turn()
    assert pair.d.scheduler.num_running == 1 and not pair.d.engine.batches
    # Compilation ends after the step and before the thread computes its sleep.
    matcher.set_result(None)
    deadline = pair.d.scheduler.next_deadline()
    assert deadline is not None and deadline < pair.clock() + 0.01
