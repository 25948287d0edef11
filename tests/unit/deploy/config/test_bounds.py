"""Bounds of numbers of processes, as written by users."""

import pytest

from tandem.deploy.config.bounds import Bounds, parse_count


def test_a_count_is_a_number_or_a_range() -> None:
    assert parse_count("3") == 3 and parse_count("-1") == -1
    assert parse_count("1:8") == Bounds(1, 8) and parse_count("0:1") == Bounds(0, 1)
    assert parse_count("4:4") == 4, "equal bounds do not follow the load"


@pytest.mark.parametrize("text", ["", "1:", ":8", "1:2:3", "a:b", "8:1", "-1:2", "1.5:3", "1 : 2"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="range"):
        parse_count(text)


def test_a_number_is_moved_into_the_bounds() -> None:
    assert [Bounds(2, 4).clamp(count) for count in (0, 2, 3, 9)] == [2, 2, 3, 4]
