from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.router.text.output_text import OutputText
from tandem.router.text.tokenizer import Tokenizer
from tests.fakes.tokenizer import ByteTokenizer


def output(*stop_strings: str, stop_token_ids: tuple[int, ...] = (0,), min_tokens: int = 0) -> OutputText:
    return OutputText(ByteTokenizer(), stop_token_ids, stop_strings, min_tokens)  # type: ignore[arg-type]


def test_text_passes_without_stop_strings() -> None:
    text = output()
    assert text.append_tokens(b"hello") == ("hello", 5)
    assert text.append_tokens([ord("!"), 0]) == ("!", 2), "the stop token is counted, and no text"
    assert (text.finish_text(), text.stopped) == ("", False)


def test_tokens_count_up_to_match() -> None:
    text = output("STOP")
    assert text.append_tokens(b"go ST") == ("go ", 5)
    assert text.append_tokens(b"UP ST") == ("STUP ", 5)
    assert text.append_tokens(b"OP and on") == ("", 2)
    assert text.stopped and text.finish_text() == ""


def test_held_text_comes_at_end() -> None:
    text = output("STOP")
    assert text.append_tokens(b"go STO") == ("go ", 6)
    assert text.append_tokens([0]) == ("", 1)
    assert (text.finish_text(), text.stopped) == ("STO", False)


def test_stop_strings_apply_after_min_tokens() -> None:
    text = output("ab", min_tokens=5)
    assert text.append_tokens(b"ab") == ("ab", 2)
    # A stop string that starts in these tokens does not count.
    assert text.append_tokens(b"a-abab.") == ("a-ab", 6)
    assert text.stopped


def test_replayed_tokens_count() -> None:
    for num_known in range(8):
        text = output("ab", min_tokens=5)
        known, rest = b"abababab"[:num_known], b"abababab"[num_known:]
        fresh = text.replay(known, 0)
        assert fresh + text.append_tokens(rest)[0] + text.finish_text() == "ababab", num_known


def test_incomplete_character_may_complete_stop_string() -> None:
    text = output("\ufffd")
    assert text.append_tokens([*b"a", 0xE2]) == ("a", 2)
    assert (text.finish_text(), text.stopped) == ("", True)


def test_stop_string_may_end_within_a_characters_bytes() -> None:
    text = output("é")
    assert text.append_tokens(b"caf\xc3") == ("caf", 4)
    assert text.append_tokens(b"\xa9s") == ("", 1)
    assert text.stopped


# --- Resumed outputs ---


def groups_of(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    start = 0
    while start < len(ids):
        size = sizes[len(groups) % len(sizes)]
        groups.append(list(ids[start : start + size]))
        start += size
    return groups


def all_text(text: OutputText, groups: Sequence[Sequence[int]]) -> str:
    sent = ""
    for group in groups:
        if not text.stopped:
            sent += text.append_tokens(group)[0]
    return sent if text.stopped else sent + text.finish_text()


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_resume_at_every_cut(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    whole_range = st.integers(0, any_tokenizer.vocab_size - 1)
    few = data.draw(st.lists(whole_range, min_size=1, max_size=6), label="few")
    ids = data.draw(st.lists(whole_range | st.sampled_from(few), min_size=1, max_size=40), label="ids")
    sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)
    groups = groups_of(ids, data.draw(sizes, label="groups before"))
    whole = any_tokenizer.decode(ids)
    stops = st.sampled_from([(), ("\n", "the"), (whole[len(whole) // 2 :][:3] or "x",), (whole[-2:] or "x", "aa")])
    stop_strings, stop_ids = data.draw(stops, label="stops"), (few[0],) if data.draw(st.booleans()) else ()
    expected = all_text(OutputText(any_tokenizer, stop_ids, stop_strings), groups)

    # The client's router dies once or twice.
    first = OutputText(any_tokenizer, stop_ids, stop_strings)
    has_ids: list[int] = []
    has_text = ""
    for group in groups[: data.draw(st.integers(1, len(groups)), label="cut")]:
        if not first.stopped:
            text, num_tokens = first.append_tokens(group)
            has_text += text
            has_ids += group[:num_tokens]
    for _ in range(2):
        second = OutputText(any_tokenizer, stop_ids, stop_strings)
        sent = second.replay(has_ids, len(has_text))
        following = groups_of(ids[len(has_ids) :], data.draw(sizes, label="groups after"))
        seen = following[: data.draw(st.integers(0, len(following)), label="next cut")]
        for group in seen:
            if not second.stopped:
                text, num_tokens = second.append_tokens(group)
                sent += text
                has_ids += group[:num_tokens]
        has_text += sent
        assert expected.startswith(has_text)
    last = OutputText(any_tokenizer, stop_ids, stop_strings)
    has_text += last.replay(has_ids, len(has_text))
    assert has_text + all_text(last, groups_of(ids[len(has_ids) :], [3])) == expected
