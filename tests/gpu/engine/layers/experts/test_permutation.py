"""The sort of pairs by expert, against torch's stable sort."""

import pytest
import torch

DEVICE = torch.device("cuda", 0)
# Tokens, experts, k, and places of a tile.
CASES = [(1, 8, 2, 64), (3, 512, 16, 128), (1000, 60, 4, 128), (8192, 128, 8, 256), (32768, 128, 8, 128)]


def uniform(num_tokens: int, num_experts: int, k: int) -> torch.Tensor:
    return torch.rand(num_tokens, num_experts, device=DEVICE).topk(k).indices.int()


def skewed(num_tokens: int, num_experts: int, k: int) -> torch.Tensor:
    """Most pairs go to a few experts, and some experts have none."""
    scores = torch.rand(num_tokens, num_experts, device=DEVICE) * torch.rand(num_experts, device=DEVICE) ** 4
    return scores.topk(k).indices.int()


def check(experts: torch.Tensor, num_experts: int, tile_rows: int, first_expert: int = 0) -> None:
    from tandem.engine.layers.experts.permutation import Permuter

    permutation = Permuter(num_experts, DEVICE).permute(experts, tile_rows, first_expert)
    local = experts.flatten().long() - first_expert
    local[(local < 0) | (local >= num_experts)] = num_experts
    order = local.argsort(stable=True)
    counts = local.bincount(minlength=num_experts + 1)[:num_experts]
    num_places = int(counts.sum())
    order = order[:num_places]
    places = torch.full_like(local, -1)
    places[order] = torch.arange(num_places, device=DEVICE)
    assert torch.equal(permutation.order[:num_places].long(), order)
    assert torch.equal(permutation.places.flatten().long(), places)
    offsets = [0, *counts.cumsum(0).tolist()]
    assert permutation.offsets.tolist() == offsets
    tiles = [
        [expert, first, min(first + tile_rows, offsets[expert + 1]), 0]
        for expert in range(num_experts)
        for first in range(offsets[expert], offsets[expert + 1], tile_rows)
    ]
    assert permutation.tiles[0, 0].item() == len(tiles) <= permutation.max_tiles
    assert permutation.tiles[1 : 1 + len(tiles)].tolist() == tiles


@pytest.mark.parametrize("routing", [uniform, skewed])
@pytest.mark.parametrize(("num_tokens", "num_experts", "k", "tile_rows"), CASES)
def test_equals_a_stable_sort(routing, num_tokens: int, num_experts: int, k: int, tile_rows: int) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    check(routing(num_tokens, num_experts, k), num_experts, tile_rows)


@pytest.mark.parametrize(("first_expert", "num_experts"), [(0, 64), (64, 64), (32, 7), (127, 1)])
def test_skips_pairs_of_other_experts(first_expert: int, num_experts: int) -> None:
    torch.manual_seed(0)
    check(uniform(1111, 128, 8), num_experts, 128, first_expert)


def test_one_expert_has_all_tokens() -> None:
    check(torch.full((5000, 1), 3, dtype=torch.int32, device=DEVICE), 8, 128)


def test_no_pair_is_of_these_experts() -> None:
    check(torch.full((100, 1), 3, dtype=torch.int32, device=DEVICE), 2, 128, first_expert=4)


def test_repeats_to_the_bit() -> None:
    from tandem.engine.layers.experts.permutation import Permuter

    torch.manual_seed(0)
    permuter, experts = Permuter(128, DEVICE), uniform(8192, 128, 8)
    first = permuter.permute(experts, 128)
    num_tiles = int(first.tiles[0, 0])
    for _ in range(100):
        other = permuter.permute(experts, 128)
        assert torch.equal(other.order, first.order) and torch.equal(other.places, first.places)
        assert torch.equal(other.tiles[: 1 + num_tiles], first.tiles[: 1 + num_tiles])
