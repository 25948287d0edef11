import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.router.text import stop_strings as module
from tandem.router.text.stop_strings import (
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    StopStringMatcher,
    check_stop_strings,
)

# Few letters, so that strings overlap.
letters = st.text("ab", max_size=12)
stops = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def cut(text: str, stop_strings: list[str]) -> str | None:
    for end in range(1, len(text) + 1):
        complete = [len(stop) for stop in stop_strings if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(complete)]
    return None


def may_be_stop(text: str, stop_strings: list[str]) -> int:
    """Returns the length of the text's end that may become part of a stop string."""
    return max((n for stop in stop_strings for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


@settings(deadline=None, max_examples=500)
@given(st.lists(letters, max_size=8), stops.filter(bool))
def test_long_and_short_pieces_agree(pieces: list[str], stop_strings: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        by_steps, at_once = StopStringMatcher(stop_strings), StopStringMatcher(stop_strings)
        for piece in pieces:
            patch.setattr(module, "MAX_STEPPED_CHARACTERS", len(piece))
            expected = by_steps.scan_next(piece)
            patch.setattr(module, "MAX_STEPPED_CHARACTERS", len(piece) - 1)
            assert (at_once.scan_next(piece), at_once.matched) == (expected, by_steps.matched)
        assert at_once.release_held() == by_steps.release_held()


def test_long_text_is_searched_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    num_steps = 0
    advance = module._Automaton.advance

    def counted(automaton: module._Automaton, character: str) -> bool:
        nonlocal num_steps
        num_steps += 1
        return advance(automaton, character)

    monkeypatch.setattr(module._Automaton, "advance", counted)
    matcher = StopStringMatcher(["a" * 100 + letter for letter in "bcde"])
    assert matcher.scan_next("a" * 1_000_000) == "a" * 999_900
    assert num_steps <= 4 * 101


@settings(deadline=None, max_examples=500)
@given(st.lists(letters, max_size=8), stops)
def test_pieces_agree_with_whole_text(pieces: list[str], stop_strings: list[str]) -> None:
    matcher = StopStringMatcher(stop_strings)
    passed_on = seen = ""
    for piece in pieces:
        seen += piece
        passed_on += matcher.scan_next(piece)
        expected = cut(seen, stop_strings)
        if expected is None:
            assert not matcher.matched
            assert passed_on == seen[: len(seen) - may_be_stop(seen, stop_strings)]
        else:
            assert matcher.matched and passed_on == expected
    passed_on += matcher.release_held()
    expected = cut(seen, stop_strings)
    assert passed_on == (seen if expected is None else expected)


@settings(deadline=None)
@given(st.text(max_size=30), st.integers(0, 30), st.integers(1, 10))
def test_stop_string_of_any_characters(text: str, start: int, length: int) -> None:
    stop = text[start : start + length]
    if stop:
        matcher = StopStringMatcher([stop])
        assert "".join(map(matcher.scan_next, text)) == text.partition(stop)[0]
        assert matcher.matched


def test_first_complete_then_longest_wins() -> None:
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


def test_values_at_limits() -> None:
    check_stop_strings([])
    check_stop_strings(["a" * 1024] * 16)


def test_found_stop_string() -> None:
    matcher = StopStringMatcher(["b", "ab", "abc"])
    assert matcher.scan_next("a") == "" and matcher.found is None
    assert matcher.scan_next("bc") == ""
    assert matcher.found == "ab"


@pytest.mark.usefixtures("no_collections")
def test_the_outputs_of_a_request_share_what_is_computed_from_its_stop_strings() -> None:
    stop_strings = [chr(65 + number) + "ab" * (MAX_STOP_STRING_LENGTH // 2 - 1) for number in range(MAX_STOP_STRINGS)]
    began = time.thread_time()
    StopStringMatcher(stop_strings)
    first = time.thread_time()
    others = [StopStringMatcher(stop_strings) for _ in range(127)]
    assert time.thread_time() - first < 20 * (first - began)
    assert others[0].scan_next(f"-{stop_strings[0]}") == "-" and not others[1].matched
