"""Room for workers that have GPUs of their own, or share them."""

from typing import Any

import pytest

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.errors import ConfigurationError
from tandem.deploy.on_ray.ray_base import num_fitting
from tandem.deploy.supervise.room import check_num_gpus, has_room


class FakeRay:
    def __init__(self, num_gpus: float) -> None:
        self._free = {"GPU": num_gpus, "CPU": 64.0}

    def num_free(self, resource: str, each: float = 1.0) -> int:
        return num_fitting(self._free[resource], each)


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
    ("free", "num_joining", "num_leaving", "expected"),
    [(0.5, 1, 0, True), (0.0, 1, 1, False), (0.5, 2, 1, False), (1.0, 2, 0, True)],
)
def test_workers_that_join_take_parts_of_a_gpu(free: float, num_joining: int, num_leaving: int, expected: bool) -> None:
    ray: Any = FakeRay(free)
    assert has_room(config(2), ray, num_joining, num_leaving) == expected
    with pytest.raises(ConfigurationError, match=r"each takes 0\.5 GPU, and Ray has room for"):
        has_room(config(2), ray, num_joining + 2, num_leaving)


def test_sums_of_parts_count_as_whole() -> None:
    assert num_fitting(1.0 - 0.3333 - 0.3333, 0.3333) == 1 and num_fitting(0.1 + 0.2, 0.3) == 1
    assert num_fitting(0.99, 0.5) == 1 and num_fitting(0.0, 0.5) == 0
