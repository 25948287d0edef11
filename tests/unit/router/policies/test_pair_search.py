"""The cheapest pair is the one that a look at all pairs finds."""

import math
import random
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.policies.pair_search import PairSearch
from tandem.router.workers.distance import distance
from tandem.router.workers.worker import Worker
from tests.fakes.routing import link
from tests.fakes.scripted_worker import hello


def make_workers(count: int, chance: random.Random, num_hosts: int, link_share: float) -> list[Worker]:
    made = [Worker(hello(f"w{i}", "both"), lambda _: None, lambda _: None, 0.0, 0.0) for i in range(count)]
    for worker in made:
        worker.host, worker.rack = f"h{chance.randrange(num_hosts)}", f"r{chance.randrange(2)}"
        link(worker, *(other for other in made if chance.random() < link_share))
    return made


def links_of(worker: Worker) -> Mapping[str, Worker]:
    return worker.decode_workers


@given(
    st.integers(0, 12),
    st.integers(0, 12),
    st.integers(1, 4),
    st.sampled_from((0.1, 0.6, 1.0)),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_the_pair_of_least_cost(
    num_senders: int, num_receivers: int, num_hosts: int, link_share: float, spans_hosts: bool, chance: random.Random
) -> None:
    made = make_workers(16, chance, num_hosts, link_share)
    senders, receivers = chance.sample(made, num_senders), chance.sample(made, num_receivers)
    sender_costs = np.array([chance.random() for _ in senders])
    near = np.array([chance.random() for _ in receivers])
    steps = sorted(chance.random() for _ in range(2)) if spans_hosts else []
    receiver_costs = [near, *(near + step for step in steps)]
    best = math.inf
    for sender, own in zip(senders, sender_costs, strict=True):
        for number, receiver in enumerate(receivers):
            if receiver is not sender and sender.decode_workers.get(receiver.worker_id) is receiver:
                tier = distance(sender, receiver) if spans_hosts else 0
                best = min(best, own + receiver_costs[tier][number])
    found = PairSearch(senders, receivers, spans_hosts=spans_hosts).least(links_of, sender_costs, receiver_costs)
    if found is None:
        assert best == math.inf
        return
    number, other, cost = found
    assert cost == pytest.approx(best)
    sender, receiver = senders[number], receivers[other]
    assert sender.decode_workers[receiver.worker_id] is receiver is not sender
    tier = distance(sender, receiver) if spans_hosts else 0
    assert cost == pytest.approx(sender_costs[number] + receiver_costs[tier][other])
