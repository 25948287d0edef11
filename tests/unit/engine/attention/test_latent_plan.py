"""Items cover each row's visible tokens once, and the cut into parts depends on the sequence and the size alone."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from tandem.engine.attention.latent_layout import LatentLayout
from tandem.engine.attention.latent_plan import (
    BLOCK,
    ITEM_SIZE,
    MERGE_SIZE,
    LatentPlan,
    LatentPlans,
    decode_plans,
    prompt_plans,
)
from tandem.engine.token_sequence import TokenSequence

NUM_PROGRAMS = 132
LAYOUT = LatentLayout(num_layers=2, page_size=16, kv_rank=512, rope_dim=64, dtype="bfloat16")


def sequences_of(lengths: Sequence[tuple[int, int]]) -> list[TokenSequence]:
    """Args: lengths: cached and new tokens of each."""
    sequences, first_page = [], 0
    for cached, new in lengths:
        num_pages = LAYOUT.num_pages_for(cached + new)
        pages = list(range(first_page, first_page + num_pages))
        first_page += num_pages
        sequences.append(TokenSequence([0] * (cached + new), cached + new, pages, cached_len=cached))
        sequences[-1].extend(new)
    return sequences


def items_of(plan: LatentPlan) -> list[list[int]]:
    items: list[list[int]] = plan.items.reshape(-1, ITEM_SIZE).tolist()
    (num_items, *_), *rest = items
    assert not any(any(item) for item in rest[num_items:])
    return rest[:num_items]


def check(plan: LatentPlan, plans: LatentPlans, sequences: Sequence[TokenSequence], num_heads: int) -> None:
    merges = [tuple(merge) for merge in plan.merges.reshape(-1, MERGE_SIZE).tolist()]
    rows = [
        (s, position) for s in sequences for position in range(s.cached_len, s.device_len) for _ in range(num_heads)
    ]
    covered: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for first_row, num_rows, to_position, first_page, start, end, part, _ in items_of(plan):
        assert 0 < num_rows <= plans.tile_rows and start % BLOCK == 0 and start < end
        covered.setdefault((first_row, num_rows), []).append((start, end, part))
        for row in (first_row, first_row + num_rows - 1):
            s, position = rows[row]
            assert row // num_heads + to_position == position
            assert list(plan.pages[first_page : first_page + len(s.page_ids)]) == s.page_ids
    assert sorted(row for first, count in covered for row in range(first, first + count)) == list(range(len(rows)))
    all_parts = []
    for (first_row, num_rows), tokens in covered.items():
        tokens.sort()
        _, last_position = rows[first_row + num_rows - 1]
        assert [start for start, _, _ in tokens] == [0, *(end for _, end, _ in tokens[:-1])]
        assert tokens[-1][1] == last_position + 1
        parts = [part for _, _, part in tokens]
        all_parts += [part for part in parts if part >= 0]
        if len(parts) == 1:
            assert parts == [-1]
        else:
            assert parts == list(range(parts[0], parts[0] + len(parts)))
            assert (first_row, num_rows, parts[0], len(parts)) in merges
    assert sorted(all_parts) == list(range(plan.num_parts))


@pytest.mark.parametrize("num_heads", [1, 16, 20, 128])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_decode(num_heads: int, num_rows: int) -> None:
    rng = random.Random(num_rows)
    sequences = sequences_of([(rng.choice((0, 63, 64, 1023, 1024, 9000)), 1) for _ in range(num_rows)])
    plans = decode_plans(num_rows, num_heads, NUM_PROGRAMS)
    plan = plans.build(LAYOUT, sequences)
    check(plan, plans, sequences, num_heads)
    assert plan.num_parts <= plans.max_parts(num_rows)


@pytest.mark.parametrize("num_heads", [4, 16, 20, 128])
@pytest.mark.parametrize("lengths", [[(0, 1)], [(5000, 9), (0, 100), (17, 3)], [(0, 300), (300, 212)]])
def test_prompts(num_heads: int, lengths: list[tuple[int, int]]) -> None:
    sequences = sequences_of(lengths)
    plans = prompt_plans(sum(new for _, new in lengths), num_heads, NUM_PROGRAMS)
    check(plans.build(LAYOUT, sequences), plans, sequences, num_heads)


def test_graphs_have_room_for_every_plan() -> None:
    """Also for padding, which sees one token of the dummy page."""
    rng = random.Random(0)
    for make_plans, num_heads, num_tokens, num_sequences, most_new in (
        (decode_plans, 16, 40, 40, 1),
        (decode_plans, 20, 8, 8, 1),
        (prompt_plans, 16, 512, 17, 300),
        (prompt_plans, 20, 16, 17, 16),
    ):
        plans = make_plans(num_tokens, num_heads, NUM_PROGRAMS)
        for _ in range(20):
            lengths: list[tuple[int, int]] = []
            left = num_tokens
            while left and len(lengths) < num_sequences - (most_new > 1) and rng.random() < 0.95:
                lengths.append((rng.choice((0, 60, 3000)), rng.randint(1, min(left, most_new))))
                left -= lengths[-1][1]
            sequences = sequences_of(lengths)
            plan = plans.build(LAYOUT, sequences, left, dummy_page=7777)
            extended = plans.extended(plan, num_sequences)
            assert extended.num_parts <= plans.max_parts(num_sequences)
            assert items_of(extended) == items_of(plan)
            assert len(extended.items) == len(plans.extended(plans.build(LAYOUT, [], num_tokens), num_sequences).items)
            padding = [item for item in items_of(plan) if plan.pages[item[3]] == 7777]
            assert sum(item[1] for item in padding) == left * num_heads
            assert all(item[4:7] == [0, 1, -1] for item in padding)


def test_neighbors_do_not_change_a_sequence_s_parts() -> None:
    def cut(lengths: list[tuple[int, int]], place: int) -> list[tuple[int, int]]:
        plan = decode_plans(4, 16, NUM_PROGRAMS).build(LAYOUT, sequences_of(lengths))
        return sorted((item[4], item[5]) for item in items_of(plan) if item[0] == place * 16)

    cuts = [
        cut([(3000, 1), (1, 1), (1, 1), (1, 1)], 0),
        cut([(1, 1), (9000, 1), (3000, 1), (70, 1)], 2),
        cut([(3000, 1), (3000, 1), (3000, 1), (3000, 1)], 3),
    ]
    assert cuts[0] == cuts[1] == cuts[2] and len(cuts[0]) > 1


def test_long_sequences_have_parts_in_large_batches() -> None:
    plan = decode_plans(512, 16, NUM_PROGRAMS).build(LAYOUT, sequences_of([(16_383, 1), *[(9, 1)] * 511]))
    assert plan.num_parts == 8
    longest = [item[5] - item[4] for item in items_of(plan)]
    assert longest == sorted(longest, reverse=True)
    assert np.array(longest[:8]).sum() == 16_384


@pytest.mark.parametrize(("batch_size", "num_heads"), [(1, 16), (8, 16), (8, 20), (32, 20), (8, 128)])
def test_parts_of_few_long_sequences_fill_the_programs_once(batch_size: int, num_heads: int) -> None:
    plan = decode_plans(batch_size, num_heads, NUM_PROGRAMS).build(LAYOUT, sequences_of([(16_383, 1)] * batch_size))
    assert 0.85 * NUM_PROGRAMS <= len(items_of(plan)) <= NUM_PROGRAMS


def test_quantized_latents_have_two_items_on_a_multiprocessor() -> None:
    plans = decode_plans(1, 16, NUM_PROGRAMS, is_quantized=True)
    assert (plans.num_programs, decode_plans(1, 16, NUM_PROGRAMS).num_programs) == (2 * NUM_PROGRAMS, NUM_PROGRAMS)
    # Tiles of 64 rows have no room for two.
    assert decode_plans(1, 128, NUM_PROGRAMS, is_quantized=True).num_programs == NUM_PROGRAMS
