"""Handover to the decode worker named in the request, and links both ways."""

import pytest

from tandem.messages import Failed, FirstToken, LeaseLost, LinkState
from tests.fakes.both_workers import BothWorkers
from tests.fakes.engine import expected_tokens
from tests.fakes.transport import ScriptedTransport


def test_request_is_decoded_at_its_named_worker() -> None:
    workers = BothWorkers(num_pages=64, names=("a", "b", "c"))
    placements = [(here, there) for here in "abc" for there in "abc"]
    prompts = {f"{here}{there}": [number, *range(10)] for number, (here, there) in enumerate(placements)}
    for (here, there), prompt in zip(placements, prompts.values(), strict=True):
        workers.submit(f"{here}{there}", prompt, prefill_at=here, decode_at=there, max_tokens=6)
    workers.run()
    for (here, there), prompt in zip(placements, prompts.values(), strict=True):
        assert workers.output(there, f"{here}{there}") == expected_tokens(prompt, 6)
        assert f"{here}{there}" in [first.request_id for first in workers.of(here, FirstToken)]
    for worker in workers.workers.values():
        stats = worker.scheduler.stats()
        # Eleven tokens in pages of four, to each other worker.
        assert [(s.receiver_id, s.num_pages) for s in stats.shipped] == [
            (name, 3) for name in "abc" if name != worker.worker_id
        ]
        assert (stats.num_locked_pages, stats.num_leased_pages, stats.num_running, stats.num_queued) == (0, 0, 0, 0)


def test_end_of_one_direction_does_not_affect_the_other() -> None:
    """Pages from b to a continue while the link from a to b ends, and stay leased."""
    ends: list[ScriptedTransport] = []

    def open_sender(*_: object) -> ScriptedTransport:
        ends.append(ScriptedTransport())
        return ends[-1]

    workers = BothWorkers(num_pages=64, open_sender=open_sender)
    from_a, from_b = ends
    workers.submit("to a", [1] * 8, prefill_at="b", decode_at="a")
    workers.submit("to b", [2] * 8, prefill_at="a", decode_at="b")
    for _ in range(6):
        workers.turn()
    assert len(from_a.pushes) == len(from_b.pushes) == 1
    leased = workers.workers["a"].scheduler.stats().num_leased_pages
    quiet: list[bool] = []
    workers.cut_link("a", "b", lambda: quiet.append(True))
    workers.run()
    assert not quiet, "a copy of that epoch may still run"
    assert workers.workers["a"].scheduler.stats().num_leased_pages == leased == 3
    assert [lost.request_id for lost in workers.of("b", LeaseLost)] == ["to b"] and not workers.of("a", LeaseLost)
    assert [failed.request_id for failed in workers.of("a", Failed)] == ["to b"]
    assert [(s.decode_worker_id, s.up) for s in workers.of("a", LinkState)] == [("b", True), ("b", False)]
    from_a.complete_all()
    from_b.complete_all()
    workers.run()
    assert quiet
    assert workers.workers["a"].scheduler.stats().num_leased_pages == 0
    # Committed settled its lease, so it is decoded.
    assert workers.output("a", "to a")


@pytest.mark.parametrize(("decode_at", "reason"), [("a", ""), ("nobody", "no link to decode worker nobody")])
def test_only_remote_handovers_need_a_link(decode_at: str, reason: str) -> None:
    workers = BothWorkers(num_pages=16, names=("a",))
    workers.workers["nobody"] = workers.workers["a"]
    workers.submit("r", [1, 2, 3], prefill_at="a", decode_at=decode_at)
    del workers.workers["nobody"]
    workers.run()
    assert [failed.reason for failed in workers.of("a", Failed)] == ([reason] if reason else [])
    assert workers.output("a", "r") == ([] if reason else expected_tokens([1, 2, 3], 3))
