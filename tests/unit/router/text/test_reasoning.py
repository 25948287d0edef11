import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.text.reasoning import REASONING_STYLES, Beginning, ReasoningParser

REASONING, OPEN, ANSWER = Beginning.REASONING, Beginning.OPEN, Beginning.ANSWER
PARSED = [
    (OPEN, "<think>\n hm.\n\n</think>\n\nYes. ", "hm.", "Yes. "),
    (OPEN, "\n<think></think>Yes.", "", "Yes."),
    (OPEN, "Yes <think>no</think>", "", "Yes <think>no</think>"),
    (OPEN, " <thin", "", " <thin"),
    (OPEN, "<think>hm </thin", "hm </thin", ""),
    (REASONING, "hm.\n</think>\nYes.</think>", "hm.", "Yes.</think>"),
    (REASONING, "<think>hm.</think>Yes.", "hm.", "Yes."),
    (REASONING, "</think>Yes.", "", "Yes."),
    (REASONING, "hm", "hm", ""),
    (ANSWER, "<think>Yes.", "", "<think>Yes."),
]


def parse(beginning: Beginning, pieces: list[str]) -> tuple[str, str]:
    parser = ReasoningParser(beginning)
    reasoning, rest = "", ""
    for parts, text in [*(parser.feed(piece) for piece in pieces), parser.finish()]:
        reasoning += "".join(part.text for part in parts)
        rest += text
    return reasoning, rest


@pytest.mark.parametrize(("beginning", "text", "reasoning", "rest"), PARSED)
def test_end_of_reasoning(beginning: Beginning, text: str, reasoning: str, rest: str) -> None:
    assert parse(beginning, [text]) == (reasoning, rest)
    assert parse(beginning, list(text)) == (reasoning, rest)


TEXTS = st.lists(st.sampled_from(["<think>", "</think>", "<th", "</", " ", "\n", "hm", "<"]), max_size=9).map("".join)


@given(st.sampled_from(Beginning), TEXTS)
def test_parts_depend_on_text_only(beginning: Beginning, text: str) -> None:
    by_character, reasoning, rest = ReasoningParser(beginning), "", ""
    whole = ReasoningParser(beginning).feed(text)[0]
    for end, character in enumerate(text, 1):
        parts, more = by_character.feed(character)
        reasoning, rest = reasoning + "".join(part.text for part in parts), rest + more
        found, found_rest = ReasoningParser(beginning).feed(text[:end])
        assert (reasoning, rest) == ("".join(part.text for part in found), found_rest)
        if end in {part.end for part in whole}:
            assert reasoning == "".join(part.text for part in whole if part.end <= end)


@pytest.mark.usefixtures("no_collections")
def test_work_per_token_is_constant() -> None:
    def seconds(beginning: Beginning, filler: str, num_pieces: int) -> float:
        parser = ReasoningParser(beginning)
        started = time.thread_time()
        for _ in range(num_pieces):
            parser.feed(filler)
        parser.finish()
        return time.thread_time() - started

    for beginning in Beginning:
        for filler in (" " * 100, "</thin", "word ", "<think>"):
            # Rescanning would take 100 times as long for 10 times the text.
            short = max(0.0003, min(seconds(beginning, filler, 500) for _ in range(3)))
            assert seconds(beginning, filler, 5_000) < 40 * short, (beginning, filler)


def test_beginning_of_output() -> None:
    always, sometimes = REASONING_STYLES["deepseek_r1"], REASONING_STYLES["qwen3"]
    assert [style.beginning("<user>hi<assistant>") for style in (always, sometimes)] == [REASONING, OPEN]
    for style in (always, sometimes):
        assert style.beginning("<assistant><think>\n") is REASONING
        assert style.beginning("<think>\n\n</think>\n\n") is ANSWER
        assert style.beginning("<think></user>") is not ANSWER
        assert style.beginning_within("<think>I go on") is REASONING
        assert style.beginning_within("<think>hm</think>I go on") is ANSWER
        assert style.beginning_within("I go on") is ANSWER
