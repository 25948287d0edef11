"""Stored pages on their way into the tree."""

import math

import pytest

from tandem.pagestore.client import load_copies, loading, node_keys
from tandem.pagestore.messages import DISK, HOST, PEER, Find, Found
from tandem.pagestore.server import finds
from tandem.worker.page_tier import TierHits
from tests.fakes.store_tier import FIRST, SECOND, TierSide, keys_of, tokens

PROMPT = tokens(5, extra=1)


def begin(side: TierSide, token_ids: list[int] = PROMPT) -> Find:
    side.open()
    side.tier.prefetch(FIRST, token_ids, "")
    side.turn()
    return side.find()


def measure(side: TierSide, seconds_a_page: float = 0.0) -> None:
    """Lets the tier measure the rate of a load, with another prompt."""
    side.copies.page_s = seconds_a_page
    prompt = tokens(3, 5000, extra=1)
    side.tier.prefetch(("measured", 0, "prefill"), prompt, "")
    side.turn()
    side.store(side.find())
    side.turn()
    side.copies.end_all()
    side.turn()
    assert side.cached(prompt) == 3
    side.tier.end(("measured", 0, "prefill"))
    side.sent.clear()


def test_stored_pages_enter_the_tree_when_their_copy_has_ended() -> None:
    side = TierSide()
    find = begin(side)
    assert find.keys == tuple(keys_of(PROMPT))
    assert side.tier.is_loading(FIRST)
    side.store(find)
    side.turn()
    assert (side.cached(PROMPT), side.cache.num_locked_pages) == (0, 5)
    assert side.ended() == [] and side.tier.is_loading(FIRST)
    side.copies.end_all()
    assert side.turn()
    assert side.ended() == [find.number]
    assert not side.tier.is_loading(FIRST)
    assert side.cached(PROMPT) == 5
    side.check_contents(PROMPT)
    assert side.tier.end(FIRST) == TierHits(host=10)
    assert side.tier.end(FIRST) == TierHits()
    side.leaks_nothing()
    # The store has these pages: they are not offered to it.
    side.turn()
    assert side.sent == []


def test_one_token_is_always_left_to_compute() -> None:
    side = TierSide()
    assert begin(side, tokens(5)).keys == tuple(keys_of(tokens(4)))


def test_only_pages_behind_the_cached_prefix_are_asked_for() -> None:
    side = TierSide()
    side.compute(tokens(2))
    find = begin(side)
    assert find.keys == tuple(keys_of(PROMPT)[2:])
    side.store(find, 2)
    side.turn()
    side.copies.end_all()
    side.turn()
    assert side.cached(PROMPT) == 4
    side.check_contents(PROMPT)


def test_namespaces_have_their_own_keys() -> None:
    side = TierSide()
    side.open()
    side.tier.prefetch(FIRST, PROMPT, "tenant")
    side.turn()
    find = side.find()
    assert find.keys == tuple(keys_of(PROMPT, "tenant"))
    side.store(find)
    side.turn()
    side.copies.end_all()
    side.turn()
    assert (side.cached(PROMPT), side.cached(PROMPT, "tenant")) == (0, 5)


def test_nothing_is_asked_for_what_is_cached_or_without_a_session() -> None:
    side = TierSide()
    side.tier.prefetch(FIRST, PROMPT, "")
    assert not side.tier.is_loading(FIRST)
    side.open()
    side.compute(PROMPT)
    side.tier.prefetch(SECOND, PROMPT, "")
    side.turn()
    assert side.take(Find) == [] and not side.tier.is_loading(SECOND)
    assert side.tier.end(FIRST) == side.tier.end(SECOND) == TierHits()


def test_a_prompt_waits_for_a_bounded_time_while_computing_is_not_measured() -> None:
    """A fresh worker above a slow disk."""
    side = TierSide()
    side.compute_s = math.inf
    find = begin(side)
    side.answer(Found(find.number, 0, (), (), (), 5))
    side.clock.advance(loading.UNKNOWN_S - 0.1)
    side.turn()
    assert side.tier.is_loading(FIRST)
    side.clock.advance(0.2)
    assert not side.tier.is_loading(FIRST)
    # A decode worker measures no computing, and loads on until its request has pages.
    side.turn()
    assert side.ended() == []
    side.tier.end(FIRST)
    assert side.ended() == [find.number]


def test_empty_answer_is_a_miss() -> None:
    side = TierSide()
    find = begin(side)
    side.store(find, 0)
    assert not side.tier.is_loading(FIRST)
    assert side.ended() == [find.number]
    assert side.tier.next_deadline() is None or side.tier.next_deadline() > side.clock()  # type: ignore[operator]


def test_request_that_starts_leaves_its_copy_to_end_alone() -> None:
    side = TierSide()
    find = begin(side)
    side.store(find)
    side.turn()
    assert side.tier.end(FIRST) == TierHits()
    side.turn()
    assert side.ended() == []
    side.copies.end_all()
    side.turn()
    assert side.ended() == [find.number]
    assert side.cached(PROMPT) == 5
    side.check_contents(PROMPT)
    side.leaks_nothing()


def test_late_answer_to_an_ended_find_is_ignored() -> None:
    side = TierSide()
    find = begin(side)
    side.tier.end(FIRST)
    assert side.ended() == [find.number]
    side.store(find)
    side.turn(2)
    assert side.copies.ins == [] and side.sent == []
    side.leaks_nothing()


def test_silent_store_delays_a_request_by_a_limited_time() -> None:
    side = TierSide()
    side.compute_s = 100.0
    find = begin(side)
    side.clock.advance(loading.ANSWER_S)
    deadline = side.tier.next_deadline()
    assert deadline is not None and deadline <= side.clock()
    side.turn()
    assert not side.tier.is_loading(FIRST)
    assert side.ended() == [find.number]
    side.store(find)
    side.turn()
    assert side.copies.ins == []


@pytest.mark.parametrize("is_asking", [False, True])
def test_store_silent_after_its_first_answer_delays_a_request_by_a_limited_time(is_asking: bool) -> None:
    """A prompt that takes long to compute may wait as long, so its deadline is no limit."""
    side = TierSide()
    side.compute_s = 1000.0
    find = begin(side)
    side.copies.region[50] = find.keys[0]
    side.answer(Found(find.number, 0, (50,), (1,), (HOST,), 0 if is_asking else 3, is_asking=is_asking))
    side.turn()
    side.copies.end_all()
    side.turn()
    side.clock.advance(loading.NEXT_ANSWER_S - 0.1)
    side.turn()
    assert side.tier.is_loading(FIRST), "the store still looks for pages"
    side.clock.advance(0.1)
    deadline = side.tier.next_deadline()
    assert deadline is not None and deadline <= side.clock()
    side.turn()
    assert not side.tier.is_loading(FIRST) and side.cached(PROMPT) == 1
    assert side.ended() == [find.number]
    side.leaks_nothing()


def test_each_answer_begins_the_wait_for_the_next_one_anew() -> None:
    side = TierSide()
    side.compute_s = 1000.0
    find = begin(side)
    side.store(find, 0, num_coming=3)
    for i in range(3):
        side.clock.advance(finds.PATIENCE_S)
        side.copies.region[50 + i] = find.keys[i]
        side.answer(Found(find.number, i, (50 + i,), (1,), (DISK,), 2 - i))
        side.turn()
        assert side.tier.is_loading(FIRST)
        side.copies.end_all()
        side.turn()
    assert side.ended() == [find.number] and side.cached(PROMPT) == 3


def test_request_waits_no_longer_than_computing_takes() -> None:
    side = TierSide()
    side.compute_s = 0.5
    find = begin(side)
    side.store(find)
    side.turn()
    side.clock.advance(0.49)
    assert side.tier.is_loading(FIRST)
    side.clock.advance(0.02)
    assert not side.tier.is_loading(FIRST)
    side.turn()
    assert side.ended() == [], "a copy still reads the slots"
    side.copies.end_all()
    side.turn()
    assert side.ended() == [find.number] and side.cached(PROMPT) == 5
    side.leaks_nothing()


def test_pages_that_are_slower_to_load_are_not_asked_for() -> None:
    side = TierSide()
    side.open()
    measure(side, seconds_a_page=0.1)
    side.compute_s = 0.4
    side.tier.prefetch(FIRST, PROMPT, "")
    side.turn()
    assert side.take(Find) == [] and not side.tier.is_loading(FIRST)
    side.compute_s = 0.6
    side.tier.prefetch(SECOND, PROMPT, "")
    side.turn()
    assert len(side.take(Find)) == 1


def test_old_measurements_are_made_again() -> None:
    side = TierSide()
    side.open()
    measure(side, seconds_a_page=0.1)
    side.compute_s = 0.4
    side.clock.advance(11.0)
    side.tier.prefetch(FIRST, PROMPT, "")
    side.turn()
    assert len(side.take(Find)) == 1


def test_first_load_is_a_small_probe() -> None:
    side = TierSide(num_pages=256)
    side.copies.page_s = 0.5 / load_copies.PROBE_PAGES
    prompt = tokens(60, extra=1)
    find = begin(side, prompt)
    side.store(find)
    side.turn(3)
    assert [len(copy.sources) for copy in side.copies.ins] == [load_copies.PROBE_PAGES]
    # Computing what is left would take less time than the measured copies.
    side.clock.advance(0.5)
    side.compute_s = 1.3
    side.copies.end_all()
    side.turn()
    assert side.ended() == [find.number] and not side.tier.is_loading(FIRST)
    assert side.cached(prompt) == load_copies.PROBE_PAGES
    assert side.tier.end(FIRST) == TierHits(host=32)


def test_two_requests_of_one_prefix_share_a_load() -> None:
    side = TierSide()
    find = begin(side)
    longer = tokens(7, extra=1)
    side.tier.prefetch(SECOND, longer, "")
    side.turn()
    assert side.take(Find) == []
    assert side.tier.is_loading(FIRST) and side.tier.is_loading(SECOND)
    side.store(find)
    side.turn()
    side.copies.end_all()
    side.turn()
    assert not side.tier.is_loading(FIRST) and side.tier.is_loading(SECOND)
    rest = side.find()
    assert rest.keys == tuple(keys_of(longer)[5:])
    side.store(rest, 1)
    side.turn()
    side.copies.end_all()
    side.turn()
    assert side.cached(longer) == 6
    side.check_contents(longer)
    assert side.tier.end(FIRST) == TierHits(host=10)
    assert side.tier.end(SECOND) == TierHits(host=12)
    side.leaks_nothing()


def test_follower_asks_for_itself_when_its_leader_ends_early() -> None:
    side = TierSide()
    first = begin(side)
    side.tier.prefetch(SECOND, PROMPT, "")
    side.turn()
    side.tier.end(FIRST)
    assert side.ended() == [first.number]
    side.turn()
    second = side.find()
    assert second.keys == first.keys
    side.store(second)
    side.turn()
    side.copies.end_all()
    side.turn()
    assert side.cached(PROMPT) == 5 and len(side.copies.ins) == 1


def test_pages_computed_meanwhile_are_not_loaded() -> None:
    side = TierSide()
    find = begin(side)
    side.compute(tokens(3))
    side.store(find)
    side.turn()
    assert side.copies.ins[0].sources == [3, 4]
    side.copies.end_all()
    side.turn()
    assert side.cached(PROMPT) == 5
    side.check_contents(PROMPT)
    assert side.tier.end(FIRST) == TierHits(host=4)


def test_pages_computed_during_the_copy_win() -> None:
    side = TierSide()
    find = begin(side)
    side.store(find)
    side.turn()
    side.compute(tokens(4))
    side.copies.end_all()
    side.turn()
    assert side.cached(PROMPT) == 5
    side.check_contents(PROMPT)
    side.leaks_nothing()


def test_evicted_prefix_is_a_miss() -> None:
    side = TierSide(num_pages=16)
    side.compute(tokens(2))
    find = begin(side)
    side.cache.drop_cached_pages()
    side.store(find)
    side.turn(2)
    assert side.copies.ins == [] and side.ended() == [find.number]
    assert not side.tier.is_loading(FIRST)
    side.leaks_nothing()


def test_full_pool_delays_a_load_until_there_is_room() -> None:
    side = TierSide(num_pages=24)
    handle = side.hold(tokens(20, 100))
    find = begin(side)
    side.store(find)
    side.turn(3)
    assert side.copies.ins == [] and side.tier.is_loading(FIRST)
    side.cache.release_pages(handle)
    side.clock.advance(load_copies.RETRY_S)
    side.turn()
    assert len(side.copies.ins) == 1


def test_loads_leave_most_of_the_pool() -> None:
    side = TierSide(num_pages=32)
    side.open()
    measure(side)
    side.tier.prefetch(FIRST, tokens(20, extra=1), "")
    side.turn()
    side.store(side.find())
    side.turn()
    assert side.cache.num_locked_pages == 8
    # All but the load's pages are available to a request.
    assert side.cache.acquire_pages(tokens(24, 900), 48, max_cached_len=0) is not None


def test_pages_from_the_disk_arrive_one_by_one() -> None:
    side = TierSide()
    find = begin(side)
    side.store(find, 1, num_coming=3)
    side.turn()
    side.copies.end_all()
    side.turn()
    assert side.ended() == [] and side.cached(PROMPT) == 1 and side.tier.is_loading(FIRST)
    for i in range(1, 4):
        side.clock.advance(0.01)
        side.copies.region[50 + i] = find.keys[i]
        side.answer(Found(find.number, i, (50 + i,), (1,), (DISK,), 3 - i))
        side.turn()
        side.copies.end_all()
        side.turn()
    assert side.ended() == [find.number] and side.cached(PROMPT) == 4
    side.check_contents(PROMPT)
    assert side.tier.end(FIRST) == TierHits(host=2, disk=6)
    assert side.tier.load_token_s()[1] == pytest.approx(0.005)


def test_pages_that_come_too_slowly_are_not_waited_for() -> None:
    side = TierSide()
    side.open()
    measure(side)
    side.compute_s = 1.0
    side.tier.prefetch(FIRST, PROMPT, "")
    side.turn()
    find = side.find()
    side.store(find, 0, num_coming=5)
    # The first page may have waited for the disk; the second shows its rate.
    for i, is_waited_for in enumerate((True, False)):
        side.clock.advance(0.4)
        side.answer(Found(find.number, i, (50 + i,), (1,), (DISK,), 4 - i))
        side.turn(2)
        side.copies.end_all()
        side.turn()
        assert side.tier.is_loading(FIRST) is is_waited_for


@pytest.mark.parametrize(
    "found",
    [
        Found(0, 1, (1,), (1,), (HOST,), 0),
        Found(0, 0, (1, 2), (1, 1), (HOST,), 0),
        Found(0, 0, (1,) * 6, (1,) * 6, (HOST,) * 6, 0),
        Found(0, 0, (1,), (1,), (HOST,), 5),
    ],
)
def test_answer_to_another_question_is_a_miss(found: Found) -> None:
    side = TierSide()
    find = begin(side)
    side.answer(Found(find.number, found.first, found.slots, found.generations, found.tiers, found.num_coming))
    side.turn()
    assert side.ended() == [find.number] and side.copies.ins == []


def test_finds_are_limited_and_go_by_priority() -> None:
    side = TierSide()
    side.open()
    for i in range(loading.MAX_FINDS + 3):
        side.tier.prefetch((str(i), 0, "prefill"), tokens(1, 100 * i, extra=1), "", priority=i)
    side.turn(5)
    finds = side.take(Find)
    assert len(finds) == loading.MAX_FINDS
    assert finds[0].keys == tuple(keys_of(tokens(1, 100 * (loading.MAX_FINDS + 2))))
    side.store(finds[0], 0)
    side.turn()
    assert len(side.take(Find)) == 1


def test_long_prompt_is_hashed_in_several_turns() -> None:
    side = TierSide(num_pages=64)
    side.open()
    prompt = tokens(3 * node_keys.HASHES_PER_TURN, extra=1)
    side.tier.prefetch(FIRST, prompt, "")
    side.turn(2)
    assert side.take(Find) == [] and side.tier.is_loading(FIRST)
    assert side.tier.next_deadline() == side.clock()
    side.turn(2)
    assert side.find().keys == tuple(keys_of(prompt))


def test_a_prefetch_waits_while_other_nodes_are_asked() -> None:
    side = TierSide()
    side.compute_s = 0.5
    find = begin(side)
    side.answer(Found(find.number, 0, (), (), (), 0, is_asking=True))
    side.turn()
    assert side.tier.is_loading(FIRST) and side.ended() == []
    side.answer(Found(find.number, 0, (), (), (), 5))
    side.turn()
    assert side.tier.is_loading(FIRST)
    side.copies.region |= dict(enumerate(find.keys))
    side.answer(Found(find.number, 0, tuple(range(5)), (1,) * 5, (PEER,) * 5, 0))
    side.turn()
    side.copies.end_all()
    side.turn()
    side.check_contents(PROMPT)
    assert side.tier.end(FIRST) == TierHits(peer=10)
    assert side.ended() == [find.number]


def test_a_prefetch_ends_when_no_other_node_has_more_and_at_its_deadline() -> None:
    side = TierSide()
    find = begin(side)
    side.answer(Found(find.number, 0, (), (), (), 0, is_asking=True))
    side.answer(Found(find.number, 0, (), (), (), 0))
    side.turn()
    assert not side.tier.is_loading(FIRST) and side.ended() == [find.number]
    side.tier.end(FIRST)
    side.tier.prefetch(SECOND, PROMPT, "")
    side.turn()
    find = side.find()
    side.answer(Found(find.number, 0, (), (), (), 0, is_asking=True))
    side.clock.advance(side.compute_s)
    side.turn()
    assert not side.tier.is_loading(SECOND) and side.ended() == [find.number]
