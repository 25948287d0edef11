import random

import pytest
import torch

from tandem.engine.expert_balance import BOUNDS, MAX_GROUPS, MIN_MEAN, READ_INTERVAL_S, ExpertBalance, GroupBalance
from tandem.engine.layers.experts.counts import ExpertCounts
from tests.fakes.clock import FakeClock

NUM_EXPERTS = 4


def make(layers: list[int]) -> tuple[ExpertCounts, ExpertBalance, FakeClock]:
    clock = FakeClock()
    counts = ExpertCounts(layers, NUM_EXPERTS, max(layers) + 1, torch.device("cpu"))
    return counts, ExpertBalance(counts, clock), clock


def read(balance: ExpertBalance, clock: FakeClock) -> list[GroupBalance]:
    clock.advance(READ_INTERVAL_S)
    for _ in range(2):
        balance.poll()
    return list(balance.groups)


@pytest.mark.parametrize(
    ("layers", "labels"),
    [
        ([5], ["5-5"]),
        ([0, 1, 2], ["0-0", "1-1", "2-2"]),
        (list(range(1, 28)), ["1-4", "5-8", "9-12", "13-15", "16-18", "19-21", "22-24", "25-27"]),
        (list(range(1, 32, 2)), ["1-3", "5-7", "9-11", "13-15", "17-19", "21-23", "25-27", "29-31"]),
    ],
)
def test_layers_form_few_groups(layers: list[int], labels: list[str]) -> None:
    _, balance, _ = make(layers)
    # All are there before the first token.
    assert [group.layers for group in balance.groups] == labels
    assert all(group == GroupBalance(group.layers, 0, (0,) * (len(BOUNDS) + 1), 0.0) for group in balance.groups)
    assert len(labels) <= MAX_GROUPS


def test_each_layer_is_an_observation_of_its_group() -> None:
    rng = random.Random(1)
    layers = list(range(20))
    counts, balance, clock = make(layers)
    expected: dict[str, list[float]] = {group.layers: [] for group in balance.groups}
    for _ in range(5):
        for layer in layers:
            grown = [rng.randrange(MIN_MEAN, 50 * MIN_MEAN) if rng.random() < 0.5 else MIN_MEAN for _ in range(4)]
            counts.counts[layer] += torch.tensor(grown)
            label = next(s for s in expected if layer <= int(s.partition("-")[2]))
            expected[label].append(max(grown) / (sum(grown) / NUM_EXPERTS))
        groups = read(balance, clock)
    for group in groups:
        seen = expected[group.layers]
        assert group.num_within == (*(sum(value <= bound for value in seen) for bound in BOUNDS), len(seen))
        assert group.total == pytest.approx(sum(seen))
        first, last = map(int, group.layers.split("-"))
        assert group.num_tokens == int(counts.counts[first : last + 1].sum())


def test_values_on_a_bound_are_within_it() -> None:
    counts, balance, clock = make([0])
    # Mean 200: 1, 1.25, 2 and 4 times.
    for grown in ([200] * 4, [250, 150, 200, 200], [400, 400, 0, 0], [0, 0, 800, 0]):
        counts.counts[0] += torch.tensor(grown)
        (group,) = read(balance, clock)
    num_within = dict(zip(BOUNDS, group.num_within, strict=False))
    assert [num_within[bound] for bound in (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 64.0)] == [1, 2, 2, 3, 3, 4, 4]
    assert group.total == 1 + 1.25 + 2 + 4


def test_few_tokens_wait_for_more() -> None:
    counts, balance, clock = make([0, 1])
    counts.counts[0] += MIN_MEAN
    counts.counts[1] += torch.tensor([4 * MIN_MEAN - 1, 0, 0, 0])
    first, second = read(balance, clock)
    assert (first.num_within[-1], second.num_within[-1]) == (1, 0)
    # Tokens are exported at once.
    assert second.num_tokens == 4 * MIN_MEAN - 1
    counts.counts[1] += torch.tensor([1, 0, 4 * MIN_MEAN, 0])
    first, second = read(balance, clock)
    assert (first.num_within[-1], second.num_within[-1]) == (1, 1)
    assert second.total == 2.0


def test_counters_are_read_at_intervals() -> None:
    counts, balance, clock = make([0])
    counts.counts += 10
    clock.advance(READ_INTERVAL_S - 0.1)
    balance.poll()
    assert balance.groups[0].num_tokens == 0
    clock.advance(0.2)
    for _ in range(2):
        balance.poll()
    counts.counts += 10
    for _ in range(2):
        balance.poll()
    assert balance.groups[0].num_tokens == 10 * NUM_EXPERTS
    assert read(balance, clock)[0].num_tokens == 20 * NUM_EXPERTS
