"""Output that waits to be written, and names of tokens."""

import pytest

from tandem.router.frontends.generation import Piece
from tandem.router.frontends.openai.answers import ChoiceBuffer, token_text
from tandem.router.text.detokenizer import IncrementalDetokenizer
from tandem.sampling_params import TokenLogprobs
from tests.fakes.tokenizer import ByteTokenizer


def test_what_is_taken_once_does_not_come_again() -> None:
    buffer = ChoiceBuffer(IncrementalDetokenizer(ByteTokenizer()))  # type: ignore[arg-type]
    buffer.append_piece(Piece(0, [97], "a", [TokenLogprobs(-1.0)]))
    buffer.append_piece(Piece(1, [98], "b", [TokenLogprobs(-2.0)]))
    assert buffer.take_unsent() == ("ab", [97, 98], [TokenLogprobs(-1.0), TokenLogprobs(-2.0)])
    buffer.append_piece(Piece(2, [], "c", [], "stop"))
    assert buffer.take_unsent() == ("c", [], [])
    assert buffer.finish_reason == "stop"


@pytest.mark.parametrize(
    ("piece", "text"), [(b" a", " a"), ("é".encode(), "é"), (b"\xc3", "bytes:\\xc3"), (b"a\xff", "bytes:\\x61\\xff")]
)
def test_part_of_a_character_is_named_by_its_bytes(piece: bytes, text: str) -> None:
    assert token_text(piece) == text
