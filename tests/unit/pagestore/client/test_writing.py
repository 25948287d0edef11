"""Pages on their way into the store."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from tandem.engine.launch_list import LaunchList
from tandem.pagestore.client import node_keys, writing
from tandem.pagestore.keys import page_key
from tandem.pagestore.messages import NO_ROOM, PRESENT, GaveUp, Put, PutGranted, Wrote
from tests.fakes.store_tier import FIRST, TierSide, keys_of, tokens
from tests.fakes.transport import ManualCompletion


def launch_writing(launches: LaunchList, page_ids: list[int]) -> ManualCompletion:
    """Adds a forward pass that writes prompts into these pages."""
    output = ManualCompletion()
    sequence = SimpleNamespace(page_ids=page_ids, cached_len=0, device_len=2 * len(page_ids))
    launches.add(output, None, SimpleNamespace(sequences=[sequence]))  # type: ignore[arg-type]
    return output


def test_new_pages_are_offered_as_a_chain_and_written() -> None:
    side = TierSide()
    side.open()
    side.compute(tokens(3))
    side.compute(tokens(2, 100))
    side.turn()
    first, second = side.take(Put)
    assert first.parent == second.parent == b""
    assert first.keys == tuple(keys_of(tokens(3))) and second.keys == tuple(keys_of(tokens(2, 100)))
    assert len(first.identities[0]) == 8 and len(first.identities) == 3
    assert side.cache.num_held_pages == 0
    slots = side.grant(first)
    side.turn()
    assert side.cache.num_held_pages == 3
    assert side.take(Wrote) == []
    side.copies.end_all()
    side.turn()
    assert side.take(Wrote) == [Wrote(slots, (1, 1, 1))]
    assert [side.copies.region[slot] for slot in slots] == keys_of(tokens(3))
    side.leaks_nothing()


def test_continuation_names_its_parent() -> None:
    side = TierSide()
    side.open()
    side.compute(tokens(2))
    side.turn()
    side.take(Put)
    side.compute(tokens(4))
    side.turn()
    (put,) = side.take(Put)
    keys = keys_of(tokens(4))
    assert (put.parent, put.keys) == (keys[1], (keys[2], keys[3]))


def test_page_is_offered_only_when_it_is_computed() -> None:
    side = TierSide()
    side.open()
    handle = side.hold(tokens(3))
    output = launch_writing(side.launches, [*handle.page_ids[1:]])
    side.cache.cache_pages(handle, tokens(3), 6)
    side.turn()
    (put,) = side.take(Put)
    assert put.keys == tuple(keys_of(tokens(3))[:1])
    output.is_done = True
    side.turn()
    (put,) = side.take(Put)
    assert put.keys == tuple(keys_of(tokens(3))[1:])


def test_page_evicted_before_its_grant_is_given_up() -> None:
    side = TierSide(num_pages=4)
    side.open()
    side.compute(tokens(2))
    side.turn()
    (put,) = side.take(Put)
    side.hold(tokens(4, 100))
    slots = side.grant(put)
    side.turn()
    assert side.copies.outs == []
    given_up = [slot for message in side.take(GaveUp) for slot in message.slots]
    assert sorted(given_up) == sorted(slots)


def test_page_evicted_while_it_is_copied_is_reused_only_afterwards() -> None:
    side = TierSide(num_pages=16)
    side.open()
    side.compute(tokens(2))
    side.turn()
    slots = side.grant(side.take(Put)[0])
    side.turn()
    assert side.cache.num_held_pages == 2
    other = side.cache.acquire_pages(tokens(14, 100), 28, max_cached_len=0)
    assert other is not None and not {*other.page_ids} & {*side.copies.outs[0].sources}
    # Its pages are no longer in the tree, and not free either.
    side.cache.drop_cached_pages()
    assert side.cached(tokens(2)) == 0 and side.cache.num_available_pages == 0
    assert side.cache.check_integrity() == ""
    side.copies.end_all()
    side.turn()
    assert side.take(Wrote) == [Wrote(slots, (1, 1))]
    assert [side.copies.region[slot] for slot in slots] == keys_of(tokens(2))
    assert side.cache.num_available_pages == 2


def test_copies_hold_few_pages_at_a_time() -> None:
    side = TierSide(num_pages=1024)
    side.open()
    side.compute(tokens(400))
    most = 0
    for _ in range(40):
        side.turn()
        for put in side.take(Put):
            side.grant(put)
        most = max(most, side.cache.num_held_pages)
        for copy in side.copies.outs[:1]:
            if not copy.is_done:
                copy.end()
            side.copies.outs.remove(copy)
    side.copies.end_all()
    side.turn(2)
    assert most == writing.MAX_HELD
    assert sum(len(message.slots) for message in side.take(Wrote)) == 400
    side.leaks_nothing()


def test_small_pool_lends_few_pages() -> None:
    side = TierSide(num_pages=16)
    side.open()
    side.compute(tokens(8))
    side.turn()
    side.grant(side.take(Put)[0])
    side.turn()
    assert side.cache.num_held_pages == 2


def test_page_without_room_is_offered_again_when_it_is_reused() -> None:
    side = TierSide()
    side.open()
    side.compute(tokens(3))
    side.turn()
    (put,) = side.take(Put)
    side.answer(PutGranted(put.number, (PRESENT, NO_ROOM, NO_ROOM), (0, 0, 0)))
    side.turn(3)
    assert side.take(Put) == []
    side.cache.release_pages(side.hold(tokens(3)))
    side.turn()
    assert side.take(Put) == [], "the store had no room a moment ago"
    side.clock.advance(writing.NO_ROOM_S)
    side.turn()
    (put,) = side.take(Put)
    assert put.keys == tuple(keys_of(tokens(3))[1:])


def test_reused_page_is_offered_again_after_a_while() -> None:
    side = TierSide()
    side.open()
    side.compute(tokens(2))
    side.turn()
    side.grant(side.take(Put)[0])
    side.copies.end_all()
    side.cache.release_pages(side.hold(tokens(2)))
    side.turn()
    assert side.take(Put) == []
    side.clock.advance(60.0)
    side.turn()
    side.cache.release_pages(side.hold(tokens(2)))
    side.turn()
    (put,) = side.take(Put)
    assert put.keys == tuple(keys_of(tokens(2)))


def test_pages_are_written_after_hits() -> None:
    side = TierSide(write_after=2)
    side.open()
    side.compute(tokens(3))
    side.turn()
    for num_hits in (1, 2):
        assert side.take(Put) == []
        side.cache.release_pages(side.hold(tokens(num_hits + 1)))
        side.turn()
    (put,) = side.take(Put)
    # The third page has one hit less.
    assert put.keys == tuple(keys_of(tokens(2)))


def test_only_requests_that_get_pages_count_as_hits() -> None:
    side = TierSide(num_pages=16, write_after=1)
    side.open()
    side.compute(tokens(3))
    for _ in range(5):
        side.cache.touch(tokens(3))
        assert side.cache.acquire_pages(tokens(20), 40, max_cached_len=6) is None
        side.turn()
    # A load continues these pages, and is no hit either.
    side.tier.prefetch(FIRST, tokens(4, extra=1), "")
    side.turn()
    side.store(side.find())
    side.turn()
    side.copies.end_all()
    side.turn()
    assert side.cached(tokens(4)) == 4
    side.cache.touch(tokens(4))
    side.turn()
    assert side.take(Put) == []
    side.cache.release_pages(side.hold(tokens(2)))
    side.turn()
    (put,) = side.take(Put)
    assert put.keys == tuple(keys_of(tokens(2)))


def test_hits_are_counted_while_a_page_need_not_be_offered_again() -> None:
    side = TierSide(write_after=1)
    side.open()
    side.compute(tokens(2))
    side.cache.release_pages(side.hold(tokens(1)))
    side.turn()
    (put,) = side.take(Put)
    side.grant(put)
    # The first page was offered, the second has its first hit.
    side.cache.release_pages(side.hold(tokens(2)))
    side.turn()
    (put,) = side.take(Put)
    assert (put.parent, put.keys) == (keys_of(tokens(1))[0], tuple(keys_of(tokens(2))[1:]))


def test_unknown_grant_is_given_up() -> None:
    side = TierSide()
    side.open()
    side.answer(PutGranted(7, (3, PRESENT, NO_ROOM, 4), (5, 0, 0, 6)))
    assert side.take(GaveUp) == [GaveUp((3, 4), (5, 6))]


def test_silent_store_gets_its_pages_offered_again_and_a_late_grant_back() -> None:
    side = TierSide()
    side.open()
    side.compute(tokens(2))
    side.turn()
    (put,) = side.take(Put)
    side.clock.advance(writing.ANSWER_S)
    side.turn()
    side.cache.release_pages(side.hold(tokens(2)))
    side.turn()
    assert len(side.take(Put)) == 1
    slots = side.grant(put)
    assert side.take(GaveUp) == [GaveUp(slots, (1, 1))]


def test_turn_hashes_few_pages_and_a_chain_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []

    def counting(before: bytes, token_ids: Sequence[int]) -> bytes:
        hashed.append(before)
        return page_key(before, token_ids)

    monkeypatch.setattr(node_keys, "page_key", counting)
    side = TierSide(num_pages=1024)
    side.open()
    side.compute(tokens(500))
    most = num_offered = 0
    for _ in range(20):
        num_before = len(hashed)
        side.turn()
        most = max(most, len(hashed) - num_before)
        for put in side.take(Put):
            num_offered += len(put.keys)
            side.answer(PutGranted(put.number, (PRESENT,) * len(put.keys), (0,) * len(put.keys)))
    assert (num_offered, len(hashed)) == (500, 500)
    assert most <= node_keys.HASHES_PER_TURN
