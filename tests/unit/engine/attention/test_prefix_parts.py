"""Parts of prefixes: which are cut, their bounds, and attention to merged parts against plain attention."""

import math
import random

import pytest
import torch

from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.attention.prefix_parts import (
    ENTRY_SIZE,
    MAX_PARTS,
    MAX_ROWS,
    MAX_TOKENS,
    CutRule,
    PrefixParts,
    cut_prefixes,
)
from tandem.engine.token_sequence import TokenSequence

RULE = CutRule(num_q_heads=32, num_kv_heads=8, tile_rows=128, num_sms=132)


def layout(page_size: int) -> KvHeadLayout:
    return KvHeadLayout(1, page_size, 2, 8, "float32")


def piece(num_new: int, prefix_len: int, page_size: int = 16, first_page: int = 0) -> TokenSequence:
    num_tokens = prefix_len + num_new
    pages = list(range(first_page, first_page - (-num_tokens // page_size)))
    sequence = TokenSequence([0] * num_tokens, num_tokens, pages, prefix_len)
    sequence.extend(num_new)
    return sequence


@pytest.mark.parametrize(
    ("num_new", "prefix_len", "is_cut"),
    [
        (128, 0, False),
        (1000, 0, False),
        (128, 500, False),
        # The host's time for the plan would exceed the device's gain.
        (64, 2048, False),
        (128, 3000, False),
        (32, 4096, True),
        (128, 4096, True),
        (256, 4096, False),
        (256, 8192, True),
        # Four tiles of 32 heads fill 132 multiprocessors.
        (480, 16_000, False),
    ],
)
def test_prefixes_are_cut_where_multiprocessors_would_idle(num_new: int, prefix_len: int, is_cut: bool) -> None:
    assert (RULE.num_parts(num_new, prefix_len, num_new) > 1) == is_cut


def test_longer_prefixes_stay_cut() -> None:
    for num_new in (16, 64, 128, 192, 256):
        cuts = [RULE.num_parts(num_new, prefix_len, num_new) > 1 for prefix_len in range(0, 32_000, 500)]
        assert cuts == sorted(cuts)


def test_parts_of_a_short_piece_fill_the_multiprocessors() -> None:
    # 128 tokens are four tiles of eight key heads.
    assert RULE.num_parts(128, 16_000, 128) == 4
    assert RULE.num_parts(32, 16_000, 32) == MAX_PARTS


def batch(seed: int) -> tuple[list[TokenSequence], int, int]:
    """Returns pieces, tokens of their forward pass, and the page size."""
    numbers = random.Random(seed)
    page_size = numbers.choice([1, 16, 64])
    sequences = []
    num_pages = 0
    while not sequences or (sum(s.extend_len for s in sequences) < 150 and numbers.random() < 0.9):
        prefix_len = numbers.choice([0, 5, numbers.randint(0, 3000), numbers.randint(8000, 32_000)])
        sequences.append(piece(numbers.choice([1, 7, 20, 64, 96]), prefix_len, page_size, num_pages))
        num_pages += len(sequences[-1].page_ids)
    return sequences, sum(s.extend_len for s in sequences) + numbers.choice([0, 13]), page_size


@pytest.mark.parametrize("seed", range(30))
def test_parts_cover_the_cut_pages_once_within_their_bounds(seed: int) -> None:
    sequences, num_tokens, page_size = batch(seed)
    parts = cut_prefixes(RULE, layout(page_size), sequences, num_tokens)
    assert parts.num_parts <= MAX_PARTS
    assert parts.rows[-1] <= MAX_ROWS
    cut = zip(sequences, parts.num_cut_pages, strict=True)
    assert list(parts.pages) == [page for s, num_pages in cut for page in s.page_ids[:num_pages]]
    assert all(n * page_size <= s.cached_len for s, n in zip(sequences, parts.num_cut_pages, strict=True))
    assert parts.first_pages == sorted(set(parts.first_pages)), "a part has no pages"
    assert parts.first_pages[-1] == len(parts.pages)
    # Every row belongs to one token.
    entries = parts.table.reshape(MAX_TOKENS, ENTRY_SIZE)
    rows = [first + stride * n for first, stride, number in entries.tolist() for n in range(number)]
    assert sorted(rows) == list(range(parts.rows[-1]))


def test_neighbours_change_no_cut() -> None:
    whole = cut_prefixes(RULE, layout(16), [piece(64, 16_000), piece(64, 0)], 128)
    for neighbour in (piece(64, 30_000), piece(3, 900)):
        both = cut_prefixes(RULE, layout(16), [neighbour, piece(64, 16_000)], 128)
        assert both.num_cut_pages[1] == whole.num_cut_pages[0]
        assert both.table.reshape(-1, ENTRY_SIZE)[neighbour.extend_len, 2] == whole.table[2] > 1


def merged_attention(
    parts: PrefixParts, sequence: TokenSequence, page_size: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Args: q: (num_new, head_dim); k, v: (num_pages * page_size, head_dim)."""
    num_new = sequence.extend_len
    rows = torch.full((parts.rows[-1],), -math.inf)
    out = torch.zeros(parts.rows[-1], q.shape[1])
    for part in range(parts.num_parts):
        pages = torch.tensor(parts.pages[parts.first_pages[part] : parts.first_pages[part + 1]])
        slots = (pages[:, None] * page_size + torch.arange(page_size)).flatten()
        scores = q @ k[slots].T
        of_part = slice(parts.rows[part], parts.rows[part + 1])
        rows[of_part] = scores.logsumexp(1)
        out[of_part] = scores.softmax(1) @ v[slots]
    start = parts.num_cut_pages[0] * page_size
    slots = torch.tensor(sequence.page_ids)[:, None] * page_size + torch.arange(page_size)
    own = slots.flatten()[start : sequence.device_len]
    future = torch.ones(num_new, len(own)).triu(len(own) - num_new + 1).bool()
    scores = (q @ k[own].T).masked_fill(future, -math.inf)
    outs, log_sums = [scores.softmax(1) @ v[own]], [scores.logsumexp(1)]
    first, stride, number = parts.table.reshape(-1, ENTRY_SIZE)[:num_new].T
    for part in range(int(number[0])):
        places = torch.tensor(first + part * stride).long()
        outs.append(out[places])
        log_sums.append(rows[places])
    weights = torch.stack(log_sums).softmax(0)
    return (weights[:, :, None] * torch.stack(outs)).sum(0)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(("num_new", "prefix_len"), [(20, 3500), (33, 4001)])
def test_merged_parts_are_plain_attention(page_size: int, num_new: int, prefix_len: int) -> None:
    sequence = piece(num_new, prefix_len, page_size)
    pages = list(sequence.page_ids)
    random.Random(0).shuffle(pages)
    sequence.page_ids = pages
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 8, generator=generator) for n in (num_new, *[len(pages) * page_size] * 2))
    parts = cut_prefixes(RULE, layout(page_size), [sequence], num_new)
    assert parts.num_parts > 1
    slots = (torch.tensor(pages)[:, None] * page_size + torch.arange(page_size)).flatten()[: sequence.device_len]
    future = torch.ones(num_new, len(slots)).triu(prefix_len + 1).bool()
    expected = (q @ k[slots].T).masked_fill(future, -math.inf).softmax(1) @ v[slots]
    found = merged_attention(parts, sequence, page_size, q, k, v)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
