"""Pages between slots and the radix tree."""

from typing import Any

import pytest

from tandem.pagestore.client import load_copies
from tandem.pagestore.messages import Find
from tests.fakes.store_tier import FIRST, SECOND, TierSide, keys_of, tokens

PROMPT = tokens(5, extra=1)


class CountedTokens(list[int]):
    """Attributes: num_read: tokens read."""

    num_read = 0

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.num_read += len(found) if isinstance(place, slice) else 1
        return found


def found(side: TierSide, token_ids: list[int]) -> Find:
    side.open()
    side.tier.prefetch(FIRST, token_ids, "")
    side.turn()
    while not (finds := side.take(Find)):
        side.turn()
    side.store(finds[0])
    return finds[0]


def test_load_of_a_long_prompt_reads_its_tokens_a_limited_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_copies, "MAX_LOAD_PAGES", 16)
    side = TierSide(num_pages=2048)
    prompt = CountedTokens(tokens(1000, extra=1))
    side.compute(prompt[:400])
    prompt.num_read = 0
    find = found(side, prompt)
    for _ in range(100):
        side.copies.end_all()
        side.turn()
    assert side.ended() == [find.number] and side.cached([*prompt]) == 1000
    assert len(side.copies.ins) == 800 / 16
    # Found, hashed and entered.
    assert prompt.num_read <= 3 * len(prompt)
    side.check_contents([*prompt])
    side.leaks_nothing()


def test_load_locks_only_the_pages_that_it_writes() -> None:
    side = TierSide()
    side.compute(tokens(2))
    found(side, PROMPT)
    side.turn()
    assert side.cache.num_locked_pages == 3
    assert side.tier.check_integrity() == ""


def test_prefix_evicted_during_the_copy_makes_it_a_miss() -> None:
    side = TierSide()
    side.compute(tokens(2))
    find = found(side, PROMPT)
    side.turn()
    side.cache.drop_cached_pages()
    side.copies.end_all()
    side.turn(2)
    assert side.cached(PROMPT) == 0 and side.cache.num_free_pages == 64
    assert side.ended() == [find.number] and not side.tier.is_loading(FIRST)
    side.leaks_nothing()


def test_pages_evicted_between_two_copies_are_loaded_again() -> None:
    side = TierSide(num_pages=256)
    prompt = tokens(load_copies.PROBE_PAGES + 4, extra=1)
    find = found(side, prompt)
    side.turn()
    side.copies.end_all()
    side.tier.settle()
    assert len(side.copies.ins) == 2
    side.cache.drop_cached_pages()
    side.copies.end_all()
    side.turn()
    for _ in range(2):
        side.copies.end_all()
        side.turn()
    assert side.cached(prompt) == len(find.keys)
    side.check_contents(prompt)
    assert side.ended() == [find.number]
    side.leaks_nothing()


def test_loads_in_a_full_pool_do_not_evict_each_others_pages_for_ever() -> None:
    side = TierSide(num_pages=64)
    side.hold(tokens(30, 9000))
    prompt = tokens(40, extra=1)
    find = found(side, prompt)
    for _ in range(100):
        side.clock.advance(load_copies.RETRY_S)
        side.turn()
        side.copies.end_all()
    assert 34 <= sum(len(copy.sources) for copy in side.copies.ins) <= load_copies.MAX_TIMES * len(find.keys)
    assert side.ended() == [find.number] and not side.tier.is_loading(FIRST)
    side.check_contents(prompt)


def test_loaded_pages_are_not_offered_but_their_continuation_is() -> None:
    side = TierSide()
    found(side, PROMPT)
    side.turn()
    side.copies.end_all()
    side.turn()
    side.sent.clear()
    side.compute(tokens(7))
    side.turn()
    ((_, put),) = side.sent
    assert (put.parent, put.keys) == (keys_of(tokens(5))[-1], tuple(keys_of(tokens(7))[5:]))


def test_wait_for_the_engine_thread_is_no_part_of_a_copys_time() -> None:
    side = TierSide()
    side.copies.page_s = 0.01
    found(side, PROMPT)
    side.turn()
    side.copies.end_all()
    side.clock.advance(0.5)
    side.turn()
    assert side.tier.load_token_s()[0] == pytest.approx(0.01 / 2)


def test_turn_starts_one_copy_and_enters_one() -> None:
    """Turns that start and enter many pages would delay running requests."""
    side = TierSide(num_pages=256)
    prompts = {FIRST: tokens(4, extra=1), SECOND: tokens(4, start=1000, extra=1)}
    found(side, tokens(2, start=2000, extra=1))
    side.turn()
    side.copies.end_all()
    side.turn()
    side.tier.end(FIRST)
    num_copies = len(side.copies.ins)
    for key, prompt in prompts.items():
        side.tier.prefetch(key, prompt, "")
    side.turn()
    for find in side.take(Find):
        side.store(find)
    num_started = []
    for _ in range(2):
        side.turn()
        num_started.append(len(side.copies.ins) - num_copies)
    assert num_started == [1, 2]
    side.copies.end_all()
    num_entered = []
    for _ in range(2):
        side.turn()
        num_entered.append(sum(side.cached(prompt) for prompt in prompts.values()))
    assert num_entered == [4, 8]
