"""Sessions, resets and the pool's requests."""

import pytest

from tandem.engine.kvcache.cache_manager import PageHandle
from tandem.pagestore.client import yielding
from tandem.pagestore.messages import Find, GaveUp, Purge, Purged, Put, Wrote
from tandem.worker.page_tier import TierHits
from tests.fakes.store_tier import FIRST, SECOND, TierSide, tokens

PROMPT = tokens(5, extra=1)


def writing(side: TierSide, num_pages: int = 2) -> tuple[int, ...]:
    """Brings pages on their way into the store; returns their slots."""
    side.compute(tokens(num_pages, 700))
    side.turn()
    slots = side.grant(side.take(Put)[0])
    side.turn()
    return slots


def loading(side: TierSide) -> Find:
    side.tier.prefetch(FIRST, PROMPT, "")
    side.turn()
    find = side.find()
    side.store(find)
    side.turn()
    return find


def test_session_ends_only_after_its_copies() -> None:
    side = TierSide()
    side.open()
    writing(side)
    loading(side)
    quiet = side.close()
    side.turn()
    assert quiet == [] and side.cache.num_held_pages == 2
    assert not side.tier.is_loading(FIRST)
    side.copies.outs[0].end()
    side.turn()
    assert quiet == []
    side.copies.ins[0].end()
    side.turn(3)
    assert quiet == [1]
    # Neither Wrote nor EndFind goes to the next session, and what was loaded is a miss.
    side.open("e2")
    side.turn(2)
    assert side.take(Wrote) == side.ended() == []
    assert side.cached(PROMPT) == 0
    side.leaks_nothing()


def test_quiet_session_ends_at_once() -> None:
    side = TierSide()
    side.open()
    side.tier.prefetch(FIRST, PROMPT, "")
    side.turn()
    assert side.close() == [1]
    assert not side.tier.is_loading(FIRST)
    assert side.tier.end(FIRST) == TierHits()
    assert side.close("never opened") == [1]


@pytest.mark.parametrize("num_turns", [0, 1])
def test_granted_pages_of_an_ended_session_are_not_written(num_turns: int) -> None:
    side = TierSide()
    side.open()
    side.compute(tokens(2))
    side.turn()
    (put,) = side.take(Put)
    side.grant(put)
    assert side.close() == [1]
    side.open("e2")
    side.turn(num_turns)
    side.grant(put)
    side.turn()
    assert side.copies.outs == []
    side.leaks_nothing()


def test_message_of_another_epoch_has_no_effect() -> None:
    side = TierSide()
    side.open("e2")
    side.tier.prefetch(FIRST, PROMPT, "")
    side.compute(tokens(2, 700))
    side.turn()
    side.grant(side.take(Put)[0], "e1")
    side.store(side.find())
    side.turn()
    assert side.copies.outs == side.copies.ins == []
    assert side.sent == []


def test_pages_of_the_time_without_a_store_are_offered_to_the_next() -> None:
    side = TierSide()
    side.compute(tokens(2))
    side.turn(2)
    assert side.sent == []
    side.open()
    side.turn()
    assert len(side.take(Put)) == 1


def test_reused_pages_are_offered_to_a_new_store() -> None:
    side = TierSide()
    side.open()
    writing(side)
    side.copies.end_all()
    side.turn()
    side.close()
    side.open("e2")
    side.turn()
    assert side.take(Put) == []
    side.cache.release_pages(side.hold(tokens(2, 700)))
    side.turn()
    assert [len(put.keys) for put in side.take(Put)] == [2]


def test_reset_keeps_a_running_load_out_of_the_tree() -> None:
    side = TierSide()
    side.open()
    find = loading(side)
    side.tier.reset()
    side.cache.drop_cached_pages()
    assert len(side.take(Purge)) == 1
    assert not side.tier.is_loading(FIRST)
    side.turn()
    assert side.cache.num_locked_pages == 5 and side.ended() == []
    side.copies.end_all()
    side.turn()
    assert side.cached(PROMPT) == 0 and side.cache.num_free_pages == 64
    assert side.ended() == [find.number]
    side.leaks_nothing()


def test_reset_gives_up_what_is_being_written() -> None:
    side = TierSide()
    side.open()
    slots = writing(side)
    side.compute(tokens(1, 800))
    side.turn()
    (asked,) = side.take(Put)
    side.compute(tokens(1, 900))
    side.tier.reset()
    side.cache.drop_cached_pages()
    late = side.grant(asked)
    assert side.take(GaveUp) == [GaveUp(late, (1,))]
    side.copies.end_all()
    side.turn(2)
    assert side.take(Wrote) == [] and side.take(Put) == []
    assert side.take(GaveUp) == [GaveUp(slots, (1, 1))]
    side.leaks_nothing()


def test_answer_from_before_a_reset_loads_nothing() -> None:
    side = TierSide()
    side.open()
    side.tier.prefetch(FIRST, PROMPT, "")
    side.turn()
    find = side.find()
    side.tier.reset()
    side.store(find)
    side.turn(2)
    assert side.copies.ins == [] and side.ended() == [find.number]


def test_reset_without_a_store_purges_the_next() -> None:
    side = TierSide()
    side.tier.reset()
    side.turn()
    assert side.sent == []
    side.open()
    ((epoch, purge),) = side.sent
    assert epoch == "e1" and isinstance(purge, Purge)
    side.answer(Purged(purge.number))
    side.sent.clear()
    side.close()
    side.open("e2")
    assert side.sent == []


def test_purge_is_sent_first_in_every_session_until_it_lasts() -> None:
    side = TierSide()
    side.open()
    side.tier.reset()
    (first,) = side.take(Purge)
    side.tier.reset()
    (purge,) = side.take(Purge)
    side.compute(tokens(2, 700))
    side.turn()
    # A store whose disk fails answers everything else.
    side.grant(side.take(Put)[0])
    side.answer(Purged(first.number))
    for epoch in ("e2", "e3"):
        side.close()
        side.sent.clear()
        side.compute(tokens(2, 300))
        side.open(epoch)
        side.turn()
        assert [type(message) for _, message in side.sent] == [Purge, Put]
        assert side.take(Purge) == [purge]
    side.answer(Purged(purge.number), "e3")
    side.sent.clear()
    side.close("e3")
    side.open("e4")
    assert side.sent == []


@pytest.mark.parametrize("drops_first", [False, True])
@pytest.mark.parametrize("write_after", [0, 1])
def test_pages_of_before_a_reset_are_never_offered(write_after: int, drops_first: bool) -> None:
    side = TierSide(write_after=write_after)
    side.open()
    side.compute(tokens(3))
    running = side.hold(tokens(3))
    others = side.cache.acquire_pages(tokens(4, 300), 8, max_cached_len=0)
    assert others is not None
    if drops_first:
        side.cache.drop_cached_pages()
    side.tier.reset()
    side.cache.drop_cached_pages()
    side.take(Purge)
    # The running requests' pages stay in the tree, and enter it, afterwards.
    assert side.cached(tokens(3)) == 3
    side.cache.cache_pages(others, tokens(4, 300), 6)
    side.cache.release_pages(others)
    side.cache.release_pages(running)
    for _ in range(3):
        side.cache.release_pages(side.hold(tokens(3)))
        side.cache.release_pages(side.hold(tokens(4, 300)))
        side.turn()
        side.clock.advance(60.0)
        side.turn()
    # A page that continues them is computed from them.
    side.compute(tokens(5))
    side.cache.release_pages(side.hold(tokens(5)))
    side.turn(2)
    assert side.sent == []
    # Once evicted, they are computed again.
    side.cache.drop_cached_pages()
    side.compute(tokens(5))
    side.cache.release_pages(side.hold(tokens(5)))
    side.turn(2)
    assert [len(put.keys) for put in side.take(Put)] == [5]


def test_growth_waits_for_copies_alone() -> None:
    side = TierSide()
    side.open()
    assert not side.tier.yields_pages()
    writing(side)
    side.compute(tokens(2, 300))
    side.turn()
    side.grant(side.take(Put)[0])
    assert side.tier.yields_pages()
    side.turn()
    assert len(side.copies.outs) == 1, "no copy starts while growth waits"
    side.copies.end_all()
    assert side.tier.yields_pages()
    side.turn()
    assert not side.tier.yields_pages() and side.cache.num_held_pages == 0


def test_refused_request_gets_a_turn_without_copies() -> None:
    side = TierSide(num_pages=16)
    side.open()
    side.compute(tokens(2, 700))
    side.compute(tokens(2, 300))
    side.turn()
    for put in side.take(Put):
        side.grant(put)
    handle: PageHandle | None = None
    for _ in range(20):
        side.turn()
        handle = side.cache.acquire_pages(tokens(16, 900), 32, max_cached_len=0)
        if handle is not None:
            break
        for copy in side.copies.outs:
            if not copy.is_done:
                copy.end()
    assert handle is not None
    assert len(side.copies.outs) == 1


def test_copies_go_on_when_the_pool_is_short_without_them() -> None:
    side = TierSide(num_pages=16)
    side.open()
    writing(side)
    side.compute(tokens(2, 300))
    side.turn()
    side.grant(side.take(Put)[0])
    for _ in range(20):
        side.turn()
        # Never fits.
        assert side.cache.acquire_pages(tokens(17, 900), 34, max_cached_len=0) is None
        side.copies.end_all()
    side.turn()
    assert sum(len(wrote.slots) for wrote in side.take(Wrote)) == 4


def test_copies_go_on_when_the_refused_request_went_away() -> None:
    side = TierSide()
    side.open()
    writing(side)
    assert side.tier.yields_pages()
    side.copies.end_all()
    side.compute(tokens(2, 300))
    side.turn()
    side.grant(side.take(Put)[0])
    side.turn()
    assert len(side.copies.outs) == 1
    deadline = side.tier.next_deadline()
    assert deadline is not None and deadline <= side.clock() + 0.001
    side.clock.advance(yielding.REST_S)
    side.turn()
    assert len(side.copies.outs) == 2


def test_idle_tier_has_no_deadline() -> None:
    side = TierSide()
    side.open()
    writing(side)
    side.copies.end_all()
    side.turn(2)
    side.tier.prefetch(SECOND, PROMPT, "")
    side.turn()
    side.store(side.find(), 0)
    side.tier.end(SECOND)
    side.turn()
    assert side.tier.next_deadline() is None
