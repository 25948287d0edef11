"""Stop strings in text that comes in pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.stop_strings import StopStringMatcher, check_stop_strings

# Few letters, so that strings overlap with themselves and each other.
letters = st.text("ab", max_size=12)
stops = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def cut(text: str, stop_strings: list[str]) -> str | None:
    """The text before the first stop string to be complete, None if there is none."""
    for end in range(1, len(text) + 1):
        complete = [len(stop) for stop in stop_strings if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(complete)]
    return None


def may_be_stop(text: str, stop_strings: list[str]) -> int:
    """How much of the text's end may still become part of a stop string."""
    return max((n for stop in stop_strings for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


@settings(deadline=None, max_examples=500)
@given(st.lists(letters, max_size=8), stops)
def test_any_pieces_give_what_the_whole_text_gives(pieces: list[str], stop_strings: list[str]) -> None:
    matcher = StopStringMatcher(stop_strings)
    passed_on = seen = ""
    for piece in pieces:
        seen += piece
        passed_on += matcher.scan_next(piece)
        expected = cut(seen, stop_strings)
        if expected is None:
            # All that can be passed on is, and no more.
            assert not matcher.matched
            assert passed_on == seen[: len(seen) - may_be_stop(seen, stop_strings)]
        else:
            assert matcher.matched and passed_on == expected
    passed_on += matcher.release_held()
    expected = cut(seen, stop_strings)
    assert passed_on == (seen if expected is None else expected)


@settings(deadline=None)
@given(st.text(max_size=30), st.integers(0, 30), st.integers(1, 10))
def test_a_stop_string_of_any_characters_is_found(text: str, start: int, length: int) -> None:
    stop = text[start : start + length]
    if stop:
        matcher = StopStringMatcher([stop])
        assert "".join(map(matcher.scan_next, text)) == text.partition(stop)[0]
        assert matcher.matched


def test_the_first_to_be_complete_wins_and_the_longest_of_those() -> None:
    for stop_strings, expected in ((["bcd", "c"], "ab"), (["c", "bc"], "a"), (["d", "bcd"], "a"), (["x"], "abcd")):
        matcher = StopStringMatcher(stop_strings)
        assert matcher.scan_next("abcd") == expected


@pytest.mark.parametrize(
    ("stop_strings", "message"),
    [
        (["a"] * 17, "stop must be at most 16 strings, not 17"),
        (["a", ""], "stop strings must have 1 to 1024 characters, not 0"),
        (["a" * 1025], "stop strings must have 1 to 1024 characters, not 1025"),
    ],
)
def test_limits(stop_strings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_stop_strings(stop_strings)


def test_no_more_than_the_limits_is_fine() -> None:
    check_stop_strings([])
    check_stop_strings(["a" * 1024] * 16)
