import random
from array import array
from collections.abc import Sequence

import pytest

from tandem.messages import CachedPrefixes
from tandem.router.workers.store_prefixes import PEER, PeerRuns, StorePrefixes, find_runs

HOST, DISK = 0, 1


def packed(identities: Sequence[int]) -> bytes:
    return array("Q", identities).tobytes()


def stored(room: int = 10**6, **tiers: Sequence[int]) -> StorePrefixes:
    prefixes = StorePrefixes(lambda: room)
    for number, name in enumerate(("host", "disk")):
        message = CachedPrefixes(number, number == 0, packed(tiers.get(name, ())), tier=number)
        assert prefixes.receive(message)
    return prefixes


def test_tiers_change_apart() -> None:
    prefixes = stored(host=[1, 2], disk=[2, 3])
    assert len(prefixes) == 4
    assert prefixes.receive(CachedPrefixes(2, False, packed([4]), packed([2]), DISK))
    assert [prefixes.holds(page) for page in (1, 2, 3, 4)] == [True] * 4
    assert prefixes.receive(CachedPrefixes(3, False, b"", packed([2]), HOST))
    assert not prefixes.holds(2)


def test_a_gap_is_noticed_once_and_mended_by_the_whole() -> None:
    prefixes = stored(host=[1])
    assert not prefixes.receive(CachedPrefixes(3, False, packed([9])))
    assert prefixes.receive(CachedPrefixes(4, False, packed([10])))
    assert not prefixes.holds(9) and not prefixes.holds(10)
    assert prefixes.receive(CachedPrefixes(5, True, packed([7])))
    assert (prefixes.holds(7), len(prefixes)) == (True, 1)


def test_foreign_tiers_and_torn_identities_are_refused() -> None:
    with pytest.raises(ValueError, match="tier 2"):
        StorePrefixes(lambda: 1).receive(CachedPrefixes(0, True, b"", tier=PEER))
    with pytest.raises(ValueError):
        StorePrefixes(lambda: 1).receive(CachedPrefixes(0, True, b"1234567"))


def test_runs_name_the_fastest_tier_of_each_page() -> None:
    pages = list(range(100, 120))
    own = stored(host=pages[:4], disk=pages[:8])
    others = [stored(host=pages[:9]), stored(host=pages[:3], disk=pages[:12])]
    peers = PeerRuns([own, *others], pages, 20)
    assert find_runs(own, peers, pages, 0, 20) == [(HOST, 4), (DISK, 8), (PEER, 12)]
    assert find_runs(own, PeerRuns(others, pages, 10), pages, 5, 10) == [(DISK, 8), (PEER, 10)]
    assert find_runs(own, peers, pages, 12, 20) == []
    assert find_runs(own, None, pages, 0, 20) == [(HOST, 4), (DISK, 8)]
    assert find_runs(None, PeerRuns(others, pages, 2), pages, 0, 2) == [(PEER, 2)]
    assert find_runs(None, None, pages, 0, 20) == []
    # Memory took pages behind some that are only on disk.
    assert find_runs(stored(host=pages[3:6], disk=pages[:4]), None, pages, 0, 20) == [(DISK, 4), (HOST, 6)]


def test_runs_match_a_search_page_by_page() -> None:
    chance = random.Random(0)
    for _ in range(300):
        pages = [chance.getrandbits(64) for _ in range(chance.randrange(1, 40))]
        cuts = [chance.randrange(len(pages) + 1) for _ in range(4)]
        own = stored(host=pages[: cuts[0]], disk=pages[: cuts[1]])
        others = [stored(host=pages[: cuts[2]]), stored(disk=pages[: cuts[3]])]
        start = chance.randrange(len(pages))
        by_page = []
        for page in pages[start:]:
            holders = [page in own.tiers[0], page in own.tiers[1], any(other.holds(page) for other in others)]
            if True not in holders:
                break
            by_page.append(holders.index(True))
        runs = find_runs(own, PeerRuns([*others, own], pages, len(pages)), pages, start, len(pages))
        ends = [start, *(end for _, end in runs)]
        found = [tier for (tier, end), before in zip(runs, ends, strict=False) for _ in range(end - before)]
        assert found == by_page
