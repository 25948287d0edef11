import pytest

from tandem.router import head_starts as module
from tandem.router.head_starts import MAX_NUM_SHARED, SHARED_S, HeadStarts


def stream(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_each_stream_gives_one() -> None:
    starts = HeadStarts(lambda: 0.0)
    assert [starts.claim(stream(number)) for number in (1, 2, 1, 1, 2, 3)] == [True, True, False, False, False, True]


def test_others_learn_of_the_latest() -> None:
    now = 0.0
    one, two = HeadStarts(lambda: now), HeadStarts(lambda: now)
    one.claim(stream(1))
    now = SHARED_S * 0.75
    one.claim(stream(2))
    assert one.recent() == [stream(1), stream(2)]
    two.learn(one.recent())
    assert not two.claim(stream(1)) and two.claim(stream(3))
    # Only a router's own claims: each tells all others.
    assert two.recent() == [stream(3)]
    now = SHARED_S * 1.5
    assert one.recent() == [stream(2)]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NUM_REMEMBERED", 100)
    starts = HeadStarts(lambda: 0.0)
    for number in range(MAX_NUM_SHARED + 100):
        starts.claim(stream(number))
    assert len(starts.recent()) == MAX_NUM_SHARED
    assert len(starts._claimed) == 100
    assert not starts.claim(stream(MAX_NUM_SHARED + 99)) and starts.claim(stream(0))
