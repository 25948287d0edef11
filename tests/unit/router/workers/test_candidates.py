import itertools
import random

import pytest

from tandem.router.policies.table import ROUTING_POLICIES
from tandem.router.process import make_policy
from tandem.router.workers.candidates import Candidates, PinnedCandidate
from tandem.router.workers.distance import ELSEWHERE, SAME_HOST, SAME_RACK
from tandem.router.workers.worker import Pair, Worker
from tests.fakes.routing import link, make_candidates, routing_request
from tests.fakes.scripted_worker import hello


def new_worker(
    worker_id: str, role: str, num_assigned: int = 0, *, has_links: bool = False, host: str = "", rack: str = ""
) -> Worker:
    said = hello(worker_id, role, has_links=has_links, host=host, rack=rack)
    worker = Worker(said, lambda _: None, lambda _: None, 0.0, 0.0)
    worker.num_assigned = num_assigned
    if role == "both":
        link(worker, worker)
    return worker


def candidates_of(*workers: Worker) -> Candidates:
    hosts = {worker.host for worker in workers}
    return Candidates({worker.worker_id: worker for worker in workers}, spans_hosts=len(hosts) > 1)


def names(candidates: Candidates) -> list[str]:
    return [f"{pair.prefill.worker_id}-{pair.decode.worker_id}" for pair in candidates]


def test_sequence_of_all_pairs() -> None:
    p0, p1, unlinked = (new_worker(f"p{i}", "prefill") for i in range(3))
    d0, d1 = (new_worker(f"d{i}", "decode") for i in range(2))
    both = new_worker("b", "both")
    link(p0, d0, d1)
    link(p1, d1)
    candidates = candidates_of(d0, p0, both, p1, unlinked, d1)
    assert names(candidates) == ["p0-d0", "p0-d1", "b-b", "p1-d1"]
    assert candidates and len(candidates) == 4
    assert [candidates[i] for i in range(4)] == list(candidates) == [candidates[i - 4] for i in range(4)]
    assert candidates[1:3] == list(candidates)[1:3] and candidates[-1] == Pair(p1, d1)
    for index in (4, -5):
        with pytest.raises(IndexError):
            candidates[index]
    assert candidates.index(Pair(both, both)) == 2
    assert min(candidates, key=lambda pair: -pair.prefill.num_assigned) == Pair(p0, d0)
    assert random.Random(0).sample(candidates, 2) and sorted(candidates, key=lambda pair: pair.decode.worker_id)


def test_stale_pairs_are_not_candidates() -> None:
    p, d, other = new_worker("p", "prefill"), new_worker("d", "decode"), new_worker("d2", "decode")
    link(p, d)
    candidates = candidates_of(p, d, other)
    assert Pair(p, d) in candidates
    assert Pair(p, other) not in candidates and Pair(d, p) not in candidates and "p" not in candidates
    # Earlier lives of the workers.
    assert Pair(p, new_worker("d", "decode")) not in candidates
    gone = new_worker("p", "prefill")
    link(gone, d)
    assert Pair(gone, d) not in candidates


def test_view_follows_workers() -> None:
    p, d = new_worker("p", "prefill"), new_worker("d", "decode")
    candidates = candidates_of(p, d)
    assert not candidates and len(candidates) == 0
    link(p, d)
    assert candidates and names(candidates) == ["p-d"]


def test_among_filters_workers() -> None:
    p0, p1 = (new_worker(f"p{i}", "prefill") for i in range(2))
    d0, d1 = (new_worker(f"d{i}", "decode") for i in range(2))
    link(p0, d0)
    link(p1, d0, d1)
    among = candidates_of(p0, p1, d0, d1).among(lambda worker: worker is not d0)
    assert among.prefill_workers == [p1] and among.decode_workers_of(p1) == [d1]
    assert names(among) == ["p1-d1"] and len(among) == 1 and among[0] == Pair(p1, d1)
    assert Pair(p1, d0) not in among and Pair(p1, d1) in among
    nobody = candidates_of(p0, d0).among(lambda worker: worker is not d0)
    assert not nobody and not nobody.prefill_workers


def test_tie_goes_to_first_pair() -> None:
    assert (pairs := make_candidates(3, 3)).least(lambda _: 0, lambda _: 0) == pairs[0]


@pytest.mark.parametrize("num_hosts", [1, 2, 7])
@pytest.mark.parametrize("share_of_links", [0.02, 0.2, 1.0])
def test_least_matches_scan_of_all_pairs(share_of_links: float, num_hosts: int) -> None:
    rng = random.Random(share_of_links)

    def one(worker_id: str, role: str, *, has_links: bool = False) -> Worker:
        host = rng.randrange(num_hosts)
        where = {"host": f"h{host}", "rack": f"r{host % 3}"}
        return new_worker(worker_id, role, rng.randrange(9), has_links=has_links, **where)

    for _ in range(60):
        prefills = [one(f"p{i}", "prefill") for i in range(rng.randint(1, 12))]
        decodes = [one(f"d{i}", "decode") for i in range(rng.randint(1, 30))]
        # Workers with links hand over to each other and to themselves.
        boths = [one(f"b{i}", "both", has_links=i > 0) for i in range(rng.randrange(4))]
        for prefill, decode in itertools.product([*prefills, *boths[1:]], [*decodes, *boths[1:]]):
            if rng.random() < share_of_links:
                link(prefill, decode)
        closed = {*rng.sample(decodes, len(decodes) // 3), *rng.sample(boths, len(boths) // 3)}
        workers = [*prefills, *decodes, *boths]
        rng.shuffle(workers)
        candidates = candidates_of(*workers).among(lambda worker, closed=closed: worker not in closed)
        if not candidates:
            continue

        def cost(pair: Pair) -> float:
            both = pair.prefill is pair.decode
            way = 4.0 * (pair.distance or 0)
            return 3 * pair.prefill.num_assigned + (0.5 if both else 2.0) * pair.decode.num_assigned + way

        least = candidates.least(
            lambda worker: 3 * worker.num_assigned,
            lambda worker: 2.0 * worker.num_assigned,
            lambda worker: 3.5 * worker.num_assigned,
            farther_cost=4.0,
        )
        assert least in candidates and cost(least) == min(map(cost, candidates))


def test_distance_of_host_and_rack() -> None:
    p = new_worker("p", "prefill", host="a", rack="x")
    far, near, here = (
        new_worker("d0", "decode", host="c", rack="y"),
        new_worker("d1", "decode", host="b", rack="x"),
        new_worker("d2", "decode", host="a", rack="x"),
    )
    link(p, far, near, here)
    assert [Pair(p, decode).distance for decode in (far, near, here)] == [ELSEWHERE, SAME_RACK, SAME_HOST]
    candidates = candidates_of(p, far, near, here)

    def chosen() -> Worker:
        return candidates.least(lambda w: w.num_assigned, lambda w: w.num_assigned, farther_cost=1.0).decode

    assert chosen() is here
    here.num_assigned = 2
    assert chosen() is near
    near.num_assigned = 2
    here.num_assigned = 3
    assert chosen() is far
    # Without racks, all hosts are in one.
    assert Pair(new_worker("p", "prefill", host="a"), new_worker("d", "decode", host="b")).distance == SAME_RACK
    assert Pair(p, p).distance is None


def test_placement_yields_if_impossible_but_not_if_busy() -> None:
    b0, b1, p = (
        new_worker("b0", "both", has_links=True),
        new_worker("b1", "both", has_links=True),
        new_worker("p", "prefill"),
    )

    def of(placement: str, *closed: Worker) -> list[str]:
        workers = {worker.worker_id: worker for worker in (b0, b1, p)}
        candidates = Candidates(workers, placement=placement).among(lambda worker: worker not in closed)
        assert bool(candidates) == bool(list(candidates)) and len(candidates) == len(list(candidates))
        return names(candidates)

    assert of("disaggregated") == ["b0-b0", "b1-b1"], "no worker has a link to another"
    link(b0, b1)
    assert of("disaggregated") == ["b0-b1"]
    assert of("disaggregated", b1) == of("disaggregated", b0) == []
    link(p, b0)
    assert of("disaggregated", b1) == ["p-b0"]
    assert of("aggregated") == ["b0-b0", "b1-b1"]
    assert of("aggregated", b0, b1) == []
    for worker in (b0, b1):
        del worker.decode_workers[worker.worker_id]
    assert of("aggregated") == ["b0-b1", "p-b0"]


@pytest.mark.parametrize("name", ROUTING_POLICIES.names)
def test_every_policy_takes_the_only_pair_of_a_move(name: str) -> None:
    """The registry links a leaving worker to no other."""
    source, destination = new_worker("b0", "both", has_links=True), new_worker("b1", "both", has_links=True)
    source.decode_workers.clear()
    pinned = PinnedCandidate(Pair(source, destination))
    chosen = make_policy(name).choose(pinned, routing_request(range(20)))
    assert chosen == Pair(source, destination) and chosen in pinned and list(pinned) == [chosen] and len(pinned) == 1
    assert pinned.among(lambda worker: False) and Pair(source, source) not in pinned
