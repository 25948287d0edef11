import pytest

from tandem.pagestore.client.load_rate import STALE_S, LoadRate
from tandem.pagestore.messages import DISK, HOST, PEER


def test_nothing_is_known_before_the_first_load() -> None:
    rate = LoadRate()
    assert not rate.is_known(0.0)
    assert (rate.answer_s(0.0), rate.copy_s(8, 0.0), rate.coming_s(DISK, 8, 0.0)) == (0.0, 0.0, 0.0)
    assert [rate.page_s(tier) for tier in (HOST, DISK, PEER)] == [None, None, None]


def test_the_latency_of_a_disk_is_not_its_rate() -> None:
    rate = LoadRate()
    rate.copied(4, 0.004, now=1.0)
    rate.came(DISK, 1, 0.5, 1.0, is_first=True)
    assert rate.coming_s(DISK, 10, 1.0) == 0.0
    assert rate.page_s(DISK) == 0.5
    rate.came(DISK, 4, 0.008, 1.1, is_first=False)
    assert rate.coming_s(DISK, 10, 1.1) == pytest.approx(0.02)
    assert rate.page_s(DISK) == pytest.approx(0.002)
    assert rate.coming_s(PEER, 10, 1.1) == 0.0


def test_old_measurements_forbid_no_load() -> None:
    rate = LoadRate()
    rate.answered(0.1, now=1.0)
    rate.copied(4, 4.0, now=1.0)
    rate.came(DISK, 4, 4.0, 1.0, is_first=False)
    assert (rate.answer_s(2.0), rate.copy_s(2, 2.0), rate.coming_s(DISK, 2, 2.0)) == (0.1, 2.0, 2.0)
    later = 1.0 + STALE_S
    assert not rate.is_known(later)
    assert (rate.answer_s(later), rate.copy_s(2, later), rate.coming_s(DISK, 2, later)) == (0.0, 0.0, 0.0)


def test_a_page_of_a_slow_tier_takes_at_least_its_copy() -> None:
    rate = LoadRate()
    rate.copied(1, 0.01, now=0.0)
    rate.came(PEER, 1, 0.001, 0.0, is_first=False)
    assert rate.page_s(PEER) == rate.page_s(HOST) == 0.01
