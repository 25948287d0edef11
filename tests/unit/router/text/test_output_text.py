"""From tokens to text, up to a stop string."""

from router.text.output_text import OutputText
from tests.fakes.tokenizer import ByteTokenizer


def output(*stop_strings: str, stop_token_ids: tuple[int, ...] = (0,)) -> OutputText:
    return OutputText(ByteTokenizer(), stop_token_ids, stop_strings)  # type: ignore[arg-type]


def test_without_stop_strings_text_passes_at_once() -> None:
    text = output()
    assert text.append_tokens(b"hello") == ("hello", 5)
    assert text.append_tokens([ord("!"), 0]) == ("!", 2), "the stop token is counted, and no text"
    assert (text.finish_text(), text.stopped) == ("", False)


def test_tokens_count_up_to_the_one_that_completed_the_match() -> None:
    text = output("STOP")
    assert text.append_tokens(b"go ST") == ("go ", 5)
    assert text.append_tokens(b"UP ST") == ("STUP ", 5)
    assert text.append_tokens(b"OP and on") == ("", 2)
    assert text.stopped and text.finish_text() == ""


def test_text_held_back_comes_at_the_end() -> None:
    text = output("STOP")
    assert text.append_tokens(b"go STO") == ("go ", 6)
    assert text.append_tokens([0]) == ("", 1)
    assert (text.finish_text(), text.stopped) == ("STO", False)


def test_half_a_character_may_complete_a_stop_string_at_the_end() -> None:
    text = output("\ufffd")
    assert text.append_tokens([*b"a", 0xE2]) == ("a", 2)
    assert (text.finish_text(), text.stopped) == ("", True)


def test_a_stop_string_may_end_within_a_character_s_bytes() -> None:
    text = output("é")
    assert text.append_tokens(b"caf\xc3") == ("caf", 4)
    assert text.append_tokens(b"\xa9s") == ("", 1)
    assert text.stopped
