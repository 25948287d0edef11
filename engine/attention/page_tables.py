"""Page tables, positions and slots for kernels."""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.engine.kvcache.base import PageLayout
from tandem.engine.token_sequence import TokenSequence

Int64s = np.ndarray[Any, np.dtype[np.int64]]


def page_tables(
    layout: PageLayout, sequences: Sequence[TokenSequence], num_cut_pages: Sequence[int] | None = None
) -> tuple["array[int]", list[int]]:
    """Returns the page ids up to device_len (int32), and the index of each sequence's first.

    Args:
        num_cut_pages: leading pages of each sequence to leave out; None: all are in the result.
    """
    # torch and numpy read an array four times as fast as a list.
    pages = array("i")
    first_pages = []
    for s, start in zip(sequences, num_cut_pages or [0] * len(sequences), strict=True):
        first_pages.append(len(pages))
        pages.extend(s.page_ids[start : layout.num_pages_for(s.device_len)])
    return pages, first_pages


def new_positions(sequences: Sequence[TokenSequence]) -> Int64s:
    """(num_tokens,)."""
    return np.concatenate([np.arange(s.cached_len, s.device_len) for s in sequences])


def decode_slots(
    layout: PageLayout, sequences: Sequence[TokenSequence], num_padding: int = 0, dummy_page: int = 0
) -> Int64s:
    """Slots of new tokens in decode: page * page_size + offset, (len(sequences) + num_padding,); padding goes to the
    dummy page."""
    page_size = layout.page_size
    slots = [s.page_ids[s.cached_len // page_size] * page_size + s.cached_len % page_size for s in sequences]
    return np.array(slots + [dummy_page * page_size] * num_padding, np.int64)


def prefill_slots(layout: PageLayout, sequences: Sequence[TokenSequence]) -> Int64s:
    """(num_tokens,)."""
    page_size = layout.page_size
    pages, first_pages = page_tables(layout, sequences)
    positions = new_positions(sequences)
    index = np.repeat(np.array(first_pages, np.int64), [s.extend_len for s in sequences]) + positions // page_size
    return np.frombuffer(pages, np.int32)[index] * np.int64(page_size) + positions % page_size
