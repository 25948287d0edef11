"""Pairs by expert, and their tiles, against a stable sort."""

from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda", 0)


def choose(num_tokens: int, num_experts: int, k: int, routing: str) -> torch.Tensor:
    """Return (num_tokens, k) int32, distinct experts of each token."""
    if routing == "same":
        return torch.arange(k, dtype=torch.int32, device=DEVICE).flip(0).repeat(num_tokens, 1)
    scores = torch.randn(num_tokens, num_experts, device=DEVICE)
    if routing == "skewed":
        scores += 3 * torch.randn(num_experts, device=DEVICE)
    return scores.topk(k).indices.int()


def align(experts: torch.Tensor, num_experts: int, rows: int, first_expert: int = 0) -> Any:
    from tandem.engine.layers.experts.alignment import Aligner

    return Aligner(DEVICE).align(experts, num_experts, rows, first_expert)


def check(aligned: Any, experts: torch.Tensor, num_experts: int, rows: int, first_expert: int) -> None:
    local = (experts.flatten() - first_expert).cpu()
    is_local = (local >= 0) & (local < num_experts)
    order = torch.where(is_local, local, num_experts).sort(stable=True).indices[: int(is_local.sum())]
    assert torch.equal(aligned.pairs[: len(order)].cpu().long(), order)
    expected, first = [], 0
    for expert, count in enumerate(local[is_local].bincount(minlength=num_experts).tolist()):
        expected += [(expert, place, first + count) for place in range(first, first + count, rows)]
        first += count
    assert aligned.num_tiles.tolist() == [len(expected)]
    assert len(expected) <= aligned.tiles.shape[1]
    assert list(zip(*aligned.tiles[:, : len(expected)].tolist(), strict=True)) == expected


@pytest.mark.parametrize("num_tokens", [1, 9, 16, 33, 255, 1024, 1031])
@pytest.mark.parametrize(("num_experts", "k"), [(8, 2), (60, 4), (64, 8), (128, 8), (3, 1), (512, 10)])
@pytest.mark.parametrize("routing", ["uniform", "skewed", "same"])
def test_pairs_by_expert(num_tokens: int, num_experts: int, k: int, routing: str) -> None:
    torch.manual_seed(0)
    experts = choose(num_tokens, num_experts, k, routing)
    for rows in (16, 64):
        check(align(experts, num_experts, rows), experts, num_experts, rows, 0)


@pytest.mark.parametrize(("first_expert", "num_experts"), [(0, 16), (16, 16), (40, 24), (63, 1), (5, 7)])
@pytest.mark.parametrize("num_tokens", [3, 100, 1024])
def test_experts_elsewhere_are_left_out(first_expert: int, num_experts: int, num_tokens: int) -> None:
    torch.manual_seed(0)
    experts = choose(num_tokens, 64, 8, "skewed")
    check(align(experts, num_experts, 16, first_expert), experts, num_experts, 16, first_expert)


def test_no_expert_of_any_token_is_here() -> None:
    experts = choose(50, 64, 8, "same")
    check(align(experts, 8, 16, first_expert=32), experts, 8, 16, 32)


def test_the_most_pairs_and_experts() -> None:
    from tandem.engine.layers.experts.alignment import MAX_EXPERTS, MAX_PAIRS

    experts = torch.randint(MAX_EXPERTS, (MAX_PAIRS, 1), dtype=torch.int32, device=DEVICE)
    check(align(experts, MAX_EXPERTS, 16), experts, MAX_EXPERTS, 16, 0)
    experts.fill_(MAX_EXPERTS - 1)
    check(align(experts, MAX_EXPERTS, 16), experts, MAX_EXPERTS, 16, 0)


def test_a_routing_may_need_all_tiles() -> None:
    """The bound on tiles is exact: each expert has one pair more than full tiles hold."""
    from tandem.engine.layers.experts.alignment import max_tiles

    num_experts, rows = 8, 16
    experts = torch.arange(num_experts, dtype=torch.int32, device=DEVICE).repeat(rows + 1)[:, None].contiguous()
    aligned = align(experts, num_experts, rows)
    assert int(aligned.num_tiles) == 2 * num_experts == max_tiles(len(experts), num_experts, rows)


def test_the_same_result_in_a_graph_and_every_time() -> None:
    from tandem.engine.layers.experts.alignment import Aligner

    torch.manual_seed(0)
    aligner = Aligner(DEVICE)
    experts = choose(200, 128, 8, "uniform")
    aligner.align(experts, 128, 32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        aligned = aligner.align(experts, 128, 32)
    for routing in ("skewed", "same", "uniform"):
        experts.copy_(choose(200, 128, 8, routing))
        for _ in range(20):
            graph.replay()
            check(aligned, experts, 128, 32, 0)
