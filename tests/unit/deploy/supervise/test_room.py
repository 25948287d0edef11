"""Room for workers that have GPUs of their own, or share them."""

from collections.abc import Mapping
from typing import Any

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.errors import ConfigurationError
from tandem.deploy.on_ray.ray_base import RayBase
from tandem.deploy.supervise.room import Leaving, check_num_gpus, has_room


class FakeRay:
    num_free: Any = RayBase.num_free

    def __init__(self, *num_gpus: float, num_cpus: float = 64.0) -> None:
        """Args: num_gpus: free ones of each host."""
        self._free = {f"node {i}": {"GPU": num, "CPU": num_cpus} for i, num in enumerate(num_gpus)}

    def free(self) -> dict[str, Mapping[str, float]]:
        return {**self._free}


def config(workers_per_gpu: int, num_decode: int = 1) -> ClusterConfig:
    return ClusterConfig("m", device="cuda", num_decode=num_decode, workers_per_gpu=workers_per_gpu)


@pytest.mark.parametrize(
    ("workers_per_gpu", "num_decode", "num_gpus", "fits"),
    [
        (1, 1, 2.0, True),
        (1, 1, 1.0, False),
        (2, 1, 1.0, True),
        (2, 2, 1.0, False),
        (2, 2, 1.5, True),
        (3, 5, 2.0, True),
    ],
)
def test_the_workers_of_a_cluster_fit(workers_per_gpu: int, num_decode: int, num_gpus: float, fits: bool) -> None:
    ray: Any = FakeRay(num_gpus)
    if fits:
        check_num_gpus(config(workers_per_gpu, num_decode), ray)
        return
    with pytest.raises(ConfigurationError, match=f"takes 2 GPUs for {num_decode + 1} workers, with workers_per_gpu "):
        check_num_gpus(config(workers_per_gpu, num_decode), ray)


def test_sharing_is_advised() -> None:
    ray: Any = FakeRay(2.0)
    with pytest.raises(ConfigurationError, match=r"but 2 GPUs here; .*let them share GPUs \(workers_per_gpu 3\)"):
        check_num_gpus(config(1, num_decode=4), ray)


@pytest.mark.parametrize(
    ("num_gpus", "degrees", "fits"),
    [
        # Three hosts of two GPUs hold six ranks, but no worker of four.
        ((2.0, 2.0, 2.0), {"prefill_tp": 4, "decode_tp": 2}, False),
        ((2.0, 4.0), {"prefill_tp": 4, "decode_tp": 2}, True),
        ((4.0, 2.0), {"prefill_tp": 2, "decode_tp": 4}, True),
        ((6.0,), {"prefill_tp": 4, "decode_tp": 2}, True),
        ((3.0, 3.0), {"tp": 2}, True),
        ((3.0, 1.0), {"tp": 2}, False),
    ],
)
def test_the_ranks_of_a_worker_need_one_host(num_gpus: tuple[float, ...], degrees: dict[str, int], fits: bool) -> None:
    settings: dict[str, Any] = {"ray_address": "10.0.0.1:6379", "placement_strategy": "pack", **degrees}
    of_ranks = ClusterConfig("m", device="cuda", **settings)
    ray: Any = FakeRay(*num_gpus)
    if fits:
        check_num_gpus(of_ranks, ray)
        return
    most = f"has {sum(num_gpus):g} GPUs left, at most {max(num_gpus):g} on one host; use fewer ranks"
    with pytest.raises(ConfigurationError, match=most):
        check_num_gpus(of_ranks, ray)


@pytest.mark.parametrize(
    ("free", "num_joining", "num_leaving", "expected"),
    [(0.5, 1, 0, True), (0.0, 1, 1, False), (0.5, 2, 1, False), (1.0, 2, 0, True)],
)
def test_workers_that_join_take_parts_of_a_gpu(free: float, num_joining: int, num_leaving: int, expected: bool) -> None:
    ray: Any = FakeRay(free)
    leaving = [Leaving("prefill", "")] * num_leaving
    assert has_room(config(2), ray, ["decode"] * num_joining, leaving) == expected
    with pytest.raises(ConfigurationError, match=rf"each takes 0\.5 GPU, and Ray has {free:g} GPU left on this host"):
        has_room(config(2), ray, ["decode"] * (num_joining + 2), leaving)


def test_groups_of_ranks_join_where_a_host_has_room_for_all() -> None:
    settings: dict[str, Any] = {"ray_address": "10.0.0.1:6379", "placement_strategy": "spread", "prefill_tp": 4}
    of_ranks = ClusterConfig("m", device="cuda", **settings)
    ray: Any = FakeRay(2.0, 3.0)
    assert has_room(of_ranks, ray, ["decode"] * 5, [])
    # The room of a worker that leaves counts on its own host.
    for node, fits in (("node 0", False), ("node 1", True), ("", False)):
        if fits:
            assert not has_room(of_ranks, ray, ["prefill"], [Leaving("decode", node)])
            continue
        with pytest.raises(
            ConfigurationError, match=r"each takes 4 GPU, 4 CPU, and Ray has 2 GPU, 64 CPU; 3 GPU, 64 CPU left"
        ):
            has_room(of_ranks, ray, ["prefill"], [Leaving("decode", node)])
    short_of_cpus: Any = FakeRay(8.0, num_cpus=3.0)
    with pytest.raises(ConfigurationError, match="4 CPU, and Ray has 8 GPU, 3 CPU left"):
        has_room(of_ranks, short_of_cpus, ["prefill"], [])


def test_sums_of_parts_count_as_whole() -> None:
    ray: Any = FakeRay(1.0 - 0.3333 - 0.3333)
    assert has_room(config(3), ray, ["decode"], []) and FakeRay(0.1 + 0.2 + 0.7).num_free("GPU") == 1
    assert FakeRay(0.99).num_free("GPU") == 0
