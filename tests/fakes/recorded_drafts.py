"""Drafts that an engine made, and those that it makes behind the same tokens computed at once."""

from collections.abc import Sequence
from typing import TypeAlias

import pytest

from tandem.engine.batch import Batch
from tandem.engine.engine import Engine
from tandem.engine.token_sequence import TokenSequence

# A copy of the sequence, and its drafts.
Made: TypeAlias = tuple[TokenSequence, list[int]]


def record_drafts(engine: Engine, patch: pytest.MonkeyPatch, made: list[Made]) -> None:
    """Adds all drafts that the engine makes to `made`, until the patch is undone."""
    maker = engine.draft_maker
    assert maker is not None
    make = maker.make

    def record(sequences: Sequence[TokenSequence], num_drafts: Sequence[int]) -> list[list[int]]:
        drafts = make(sequences, num_drafts)
        for sequence, of_sequence in zip(sequences, drafts, strict=True):
            made.append((_copy(sequence, ()), of_sequence))
        return drafts

    patch.setattr(maker, "make", record)


def drafts_of_one_prefill(engine: Engine, sequence: TokenSequence, num_drafts: int) -> list[int]:
    """Returns the drafts behind these tokens if one forward pass has computed all but the last. No pages are in use."""
    assert engine.draft_maker is not None
    anew = _copy(sequence, range(engine.pool.num_pages))
    anew.extend(len(anew.token_ids) - 1)
    if anew.extend_len:
        engine.forward(Batch.of([], [anew])).token_ids()
    anew.complete_extend()
    return engine.draft_maker.make([anew], [num_drafts])[0]


def _copy(sequence: TokenSequence, page_ids: Sequence[int]) -> TokenSequence:
    return TokenSequence([*sequence.token_ids], sequence.prompt_len, page_ids, sampling=sequence.sampling)
