"""Streams of leaving workers move to the others without losing or repeating a token."""

import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.sampling_params import SamplingParams
from tests.cluster.conftest import RESTART_S, Clusters, Oracle, ServedCluster, random_ids, wait_linked, wait_until
from tests.cluster.faults import LiveStream

# The load takes turns with starting processes on a busy host.
pytestmark = pytest.mark.timeout(1800)
NUM_TOKENS = 250
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "presence_penalty": 0.5}


@pytest.fixture
def served(tiny_workers: ServedCluster) -> ServedCluster:
    return tiny_workers


@pytest.fixture
def roomy(clusters: Clusters, tiny_config: ClusterConfig) -> Iterator[ServedCluster]:
    """Pools for many streams, and two routers."""
    served = clusters.get(
        replace(tiny_config, num_prefill=0, num_decode=0, num_any=2, num_routers=2, num_pages=1024, drain_timeout_s=60)
    )
    wait_linked(served)
    yield served
    served.wait_clean()


@contextmanager
def leaving(served: ServedCluster, worker_id: str) -> Iterator[None]:
    """A worker leaves, but is not stopped, until the end of the context."""
    names = list(served.cluster._processes.worker_plans)
    try:
        tell(served, [name for name in names if name != worker_id])
        yield
    finally:
        tell(served, names)


def tell(served: ServedCluster, names: Sequence[str]) -> None:
    ray.get(served.cluster._processes.tell_routers(names))


def sampling(rng: random.Random) -> dict[str, Any]:
    return {"seed": rng.getrandbits(32), **SAMPLED}


def start_streams(
    served: ServedCluster, rng: random.Random, count: int, num_tokens: int = NUM_TOKENS
) -> list[LiveStream]:
    """Start greedy and sampled streams in turn."""
    streams = []
    for number in range(count):
        sampling: dict[str, Any] = {"seed": rng.getrandbits(32), **SAMPLED} if number % 2 else {}
        prompt_ids = random_ids(rng, rng.randrange(10, 80))
        streams.append(LiveStream(served, prompt_ids, max_tokens=num_tokens, ignore_eos=True, **sampling))
    return streams


def check_exact(oracle: Oracle, streams: Sequence[LiveStream]) -> None:
    """Check all streams by transformers. An undisturbed run of a sampled one may differ where rounding decides."""
    for stream in streams:
        answer = stream.finish()
        assert len(answer.token_ids) == stream.sampling["max_tokens"]
        if "seed" not in stream.sampling:
            assert oracle.confirms(stream.prompt_ids, answer.token_ids)
        else:
            sampling = SamplingParams(len(answer.token_ids), seed=stream.sampling["seed"], **SAMPLED)
            assert oracle.may_draw(stream.prompt_ids, answer.token_ids, sampling)


def busiest_worker(served: ServedCluster) -> str:
    """The oldest stream of a worker stays, so one that decodes a single stream moves none."""

    def num_running() -> dict[str, int]:
        return {worker.worker_id: worker.stats.num_running for worker in served.client.server_info().workers}

    wait_until(lambda: max(num_running().values()) > 1, RESTART_S, "a worker decodes several streams")
    counts = num_running()
    return max(counts, key=counts.__getitem__)


def num_moved(streams: Sequence[LiveStream]) -> int:
    """Count streams whose last attempt was computed at one worker and decoded at the other."""
    handovers = [stream.finish().last.handover for stream in streams]
    return sum(h.attempts > 1 and h.prefill_worker != h.decode_worker for h in handovers)


def show_gaps(name: str, streams: Sequence[LiveStream]) -> None:
    gaps = [1e3 * stream.longest_gap_after_first() for stream in streams]
    if gaps:
        p50, p99 = np.percentile(gaps, (50, 99))
        print(
            f"{name}: {len(gaps)} streams, longest gap of each: p50 {p50:.0f}, p99 {p99:.0f}, most {max(gaps):.0f} ms"
        )


def test_streams_of_a_leaving_worker_move(served: ServedCluster, tiny_oracle: Oracle) -> None:
    streams = start_streams(served, random.Random(1), 6)
    assert all(stream.wait_tokens(5) for stream in streams)
    with leaving(served, busiest_worker(served)):
        for stream in streams:
            stream.finish()
    check_exact(tiny_oracle, streams)
    assert num_moved(streams) >= 1
    show_gaps("moved", streams)


@pytest.mark.slow
def test_pretrained_model_s_streams_move(clusters: Clusters, tiny_config: ClusterConfig, smollm2_dir: Path) -> None:
    config = replace(tiny_config, model=str(smollm2_dir), num_prefill=0, num_decode=0, num_any=2, num_pages=256)
    served = clusters.get(config)
    wait_linked(served)
    streams = start_streams(served, random.Random(1), 6, num_tokens=100)
    assert all(stream.wait_tokens(5) for stream in streams)
    job = served.cluster.restart("worker-1")
    for stream in streams:
        stream.finish()
    while job.next_line(RESTART_S) is not None:
        pass
    check_exact(Oracle(smollm2_dir), streams)
    assert num_moved(streams) >= 1
    show_gaps("moved", streams)
    served.wait_clean()


@pytest.mark.slow
def test_two_hundred_moves_under_load(roomy: ServedCluster, tiny_oracle: Oracle) -> None:
    rng = random.Random(2)
    moved: list[LiveStream] = []
    others: list[LiveStream] = []
    while len(moved) < 200:
        streams = start_streams(roomy, rng, 16, num_tokens=400)
        assert all(stream.wait_tokens(rng.randrange(2, 60)) for stream in streams)
        with leaving(roomy, f"worker-{rng.randrange(2)}"):
            for stream in streams:
                stream.finish()
        for stream in streams:
            (moved if num_moved([stream]) else others).append(stream)
        check_exact(tiny_oracle, streams)
        print(f"{len(moved)} moved, {len(others)} others", flush=True)
    show_gaps("moved", moved)
    show_gaps("others", others)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["worker-0", "worker-1"])
def test_kill_of_either_side_during_moves_loses_no_token(
    roomy: ServedCluster, tiny_oracle: Oracle, killed: str
) -> None:
    rng = random.Random(3)
    num_restarted = 0
    for _ in range(3):
        streams = start_streams(roomy, rng, 10, num_tokens=400)
        assert all(stream.wait_tokens(10) for stream in streams)
        with leaving(roomy, "worker-1"):
            time.sleep(rng.uniform(0.0, 0.1))
            roomy.kill(killed, signal.SIGKILL)
            if killed == "worker-0":
                # Nobody else serves.
                tell(roomy, list(roomy.cluster._processes.worker_plans))
            for stream in streams:
                stream.finish()
        wait_linked(roomy)
        check_exact(tiny_oracle, streams)
        num_restarted += sum(stream.finish().last.handover.attempts > 1 for stream in streams)
    assert num_restarted
