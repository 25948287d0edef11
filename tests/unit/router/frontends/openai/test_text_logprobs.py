"""Tokens of the parts of an output, found by their place in its text."""

from typing import Any

import pytest

from tandem.router.frontends.generation import Piece
from tandem.router.frontends.openai.text_logprobs import TextLogprobs
from tandem.router.text.detokenizer import IncrementalDetokenizer
from tandem.router.text.output_parts import Part
from tandem.sampling_params import TokenLogprobs
from tests.fakes import chat_templates


def fed(text: str, *, step: int, special: tuple[str, ...] = ()) -> TextLogprobs:
    """Returns it after all pieces of a text whose bytes are tokens, except for the special ones."""
    tokenizer = chat_templates.tokenizer(chat_templates.QWEN25, special)
    marks = tokenizer.special_ids(special)
    token_ids = tokenizer.tokenize(text, False).ids
    found, detokenizer = TextLogprobs(tokenizer, marks), IncrementalDetokenizer(tokenizer, marks)
    for start in range(0, len(token_ids), step):
        ids = token_ids[start : start + step]
        entries = [TokenLogprobs(-float(start + place)) for place in range(len(ids))]
        found.feed(Piece(start, ids, detokenizer.decode_next(ids), entries))
    return found


def places(entries: list[dict[str, Any]]) -> list[int]:
    return [-int(entry["logprob"]) for entry in entries]


@pytest.mark.parametrize("step", [1, 3, 100])
def test_each_part_has_its_own_tokens(step: int) -> None:
    # The mark holds the text of the part behind it.
    text = "<think>\nthink</think>\n\nthank<tool_call>"
    logprobs = fed(text, step=step)
    # Each of the marks is one token.
    assert places(logprobs.take(Part("reasoning", "think", text.index("</")))) == [2, 3, 4, 5, 6]
    assert places(logprobs.take(Part("content", "tha", text.rindex("nk<")))) == [10, 11, 12]
    assert places(logprobs.take(Part("content", "nk", text.index("<tool")))) == [13, 14]
    assert logprobs.take(Part("content", "not there", len(text))) == []


def test_special_tokens_in_the_text_count_as_their_text() -> None:
    logprobs = fed("a<tool_call>b</tool_call>", step=1, special=("<tool_call>", "</tool_call>"))
    assert places(logprobs.take(Part("content", "a", 1))) == [0]
    assert places(logprobs.take(Part("arguments", "b", 13))) == [2]


def test_the_bytes_of_one_character_stay_together() -> None:
    logprobs = fed("aü🙂b", step=100)
    assert places(logprobs.take(Part("content", "a", 1))) == [0]
    entries = logprobs.take(Part("content", "ü🙂", 3))
    assert places(entries) == [1, 2, 3, 4, 5, 6]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == "ü🙂"
    assert entries[0]["token"].startswith("bytes:")
    assert places(logprobs.take(Part("content", "b", 4))) == [7]
