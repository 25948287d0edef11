from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.router.text.detokenizer import IncrementalDetokenizer
from tandem.router.text.tokenizer import Tokenizer
from tests.fakes.tokenizer_files import byte_level, save


def pieces_of(tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    """Args: cuts: sizes of the chunks, repeated."""
    detokenizer, pieces, at, turn = IncrementalDetokenizer(tokenizer), [], 0, 0
    while at < len(ids):
        size = cuts[turn % len(cuts)]
        pieces.append(detokenizer.decode_next(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*pieces, detokenizer.decode_rest()]


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_pieces_join_to_whole_text(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    whole_range = st.integers(0, any_tokenizer.vocab_size - 1)
    few = data.draw(st.lists(whole_range, min_size=1, max_size=6), label="few")  # runs and repeats
    ids = data.draw(st.lists(whole_range | st.sampled_from(few), max_size=60), label="ids")
    cuts = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5), label="cuts")
    assert "".join(pieces_of(any_tokenizer, ids, cuts)) == any_tokenizer.decode(ids)


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")))
@settings(max_examples=50, deadline=None)
def test_characters_are_never_split(any_tokenizer: Tokenizer, text: str) -> None:
    pieces = pieces_of(any_tokenizer, ids := any_tokenizer.encode(text), [1])
    if "\ufffd" not in any_tokenizer.decode(ids):
        assert not any("\ufffd" in piece for piece in pieces)


def test_character_comes_with_last_byte(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level()))
    ids = tokenizer.encode("a€😀")
    assert pieces_of(tokenizer, ids, [1]) == ["a", "", "", "€", "", "", "", "😀", ""]
    assert pieces_of(tokenizer, ids[:-1], [1])[-1] == "\ufffd"
    assert pieces_of(tokenizer, [256, *ids[:2], 257, *ids[2:4], 258, 259], [1])[4:] == [
        "",
        "€",
        "<think>",
        "two words",
        "",
    ]


def test_new_text_after_rest(any_tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(any_tokenizer)
    for ids in ([300, 5, 40, 200], [200, 300], []):
        assert detokenizer.decode_next(ids) + detokenizer.decode_rest() == any_tokenizer.decode(ids)


def test_work_per_token_does_not_grow(any_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, decode = [0], Tokenizer.decode

    def counting(self: Tokenizer, ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return decode(self, ids)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    start = 270 if any_tokenizer.vocab_size > 300 else 100
    ids = [start + index % 40 for index in range(1000)]
    pieces = pieces_of(any_tokenizer, ids, [1])
    assert max(lengths) < 10
    assert sum(map(len, pieces)) > 500
