"""Streams of leaving workers move to the others without losing or repeating a token."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import ray

from tandem.deploy.config.cluster_config import ClusterConfig
from tests.cluster.conftest import Clusters, Oracle, ServedCluster, random_ids, wait_until
from tests.cluster.faults import LiveStream

NUM_TOKENS = 300


@pytest.fixture
def served(clusters: Clusters, tiny_config: ClusterConfig) -> Iterator[ServedCluster]:
    served = clusters.get(replace(tiny_config, num_prefill=0, num_decode=0, num_any=2))
    yield served
    served.wait_clean()


@contextmanager
def leaving(served: ServedCluster, worker_id: str) -> Iterator[None]:
    """A worker leaves, but is not stopped, until the end of the context."""
    names = served.cluster.worker_names
    tell(served, [name for name in names if name != worker_id])
    try:
        yield
    finally:
        tell(served, names)


def tell(served: ServedCluster, names: Sequence[str]) -> dict[str, int]:
    """Return the requests left on leaving workers."""
    left: dict[str, int] = {}
    for answer in ray.get(served.cluster.tell_routers(names)):
        for name, count in answer.items():
            left[name] = left.get(name, 0) + count
    return left


def num_left(served: ServedCluster, worker_id: str) -> int:
    return tell(served, [name for name in served.cluster.worker_names if name != worker_id])[worker_id]


def test_streams_of_a_leaving_worker_move(served: ServedCluster, tiny_oracle: Oracle) -> None:
    rng = random.Random(1)
    wait_until(lambda: all(set(w.linked_to) - {w.worker_id} for w in served.client.server_info().workers), 20.0, "links")
    streams = [
        LiveStream(served, random_ids(rng, 40), max_tokens=NUM_TOKENS, ignore_eos=True) for number in range(8)
    ]
    assert all(stream.wait_tokens(20) for stream in streams)
    with leaving(served, "worker-1"):
        answers = [stream.finish() for stream in streams]
    for stream, answer in zip(streams, answers, strict=True):
        print(answer.last.handover.attempts, answer.last.handover.prefill_worker, answer.last.handover.decode_worker, stream.longest_gap())
        assert len(answer.token_ids) == NUM_TOKENS
        assert tiny_oracle.confirms(stream.prompt_ids, answer.token_ids)
    assert max(a.last.handover.attempts for a in answers) > 1
