"""Stop strings in text that comes in pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.output_text import OutputText
from router.stop_strings import StopStringMatcher, check_stop_strings
from tests.fakes.tokenizer import ByteTokenizer

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
        passed_on += matcher.push(piece)
        expected = cut(seen, stop_strings)
        if expected is None:
            # All that can be passed on is, and no more.
            assert not matcher.matched
            assert passed_on == seen[: len(seen) - may_be_stop(seen, stop_strings)]
        else:
            assert matcher.matched and passed_on == expected
    passed_on += matcher.flush()
    expected = cut(seen, stop_strings)
    assert passed_on == (seen if expected is None else expected)


@settings(deadline=None)
@given(st.text(max_size=30), st.integers(0, 30), st.integers(1, 10))
def test_a_stop_string_of_any_characters_is_found(text: str, start: int, length: int) -> None:
    stop = text[start : start + length]
    if stop:
        matcher = StopStringMatcher([stop])
        assert "".join(map(matcher.push, text)) == text.partition(stop)[0]
        assert matcher.matched


def test_the_first_to_be_complete_wins_and_the_longest_of_those() -> None:
    for stop_strings, expected in ((["bcd", "c"], "ab"), (["c", "bc"], "a"), (["d", "bcd"], "a"), (["x"], "abcd")):
        matcher = StopStringMatcher(stop_strings)
        assert matcher.push("abcd") == expected


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


# --- tokens to text ------------------------------------------------------------------------------------------------


def output(*stop_strings: str, stop_token_ids: tuple[int, ...] = (0,)) -> OutputText:
    return OutputText(ByteTokenizer(), stop_token_ids, stop_strings)  # type: ignore[arg-type]


def test_without_stop_strings_text_passes_at_once() -> None:
    text = output()
    assert text.push(b"hello") == ("hello", 5)
    assert text.push([ord("!"), 0]) == ("!", 2), "the stop token is counted, and no text"
    assert (text.flush(), text.stopped) == ("", False)


def test_tokens_count_up_to_the_one_that_completed_the_match() -> None:
    text = output("STOP")
    assert text.push(b"go ST") == ("go ", 5)
    assert text.push(b"UP ST") == ("STUP ", 5)
    assert text.push(b"OP and on") == ("", 2)
    assert text.stopped and text.flush() == ""


def test_text_held_back_comes_at_the_end() -> None:
    text = output("STOP")
    assert text.push(b"go STO") == ("go ", 6)
    assert text.push([0]) == ("", 1)
    assert (text.flush(), text.stopped) == ("STO", False)


def test_half_a_character_may_complete_a_stop_string_at_the_end() -> None:
    text = output("\ufffd")
    assert text.push([*b"a", 0xE2]) == ("a", 2)
    assert (text.flush(), text.stopped) == ("", True)


def test_a_stop_string_may_end_within_a_character_s_bytes() -> None:
    text = output("é")
    assert text.push(b"caf\xc3") == ("caf", 4)
    assert text.push(b"\xa9s") == ("", 1)
    assert text.stopped
