"""Checks that Ray has room for the workers."""

from tandem.deploy.config.cluster_config import DEVICES_PER_WORKER, ClusterConfig
from tandem.deploy.errors import ConfigurationError
from tandem.deploy.on_ray.ray_base import RayBase


def check_num_gpus(config: ClusterConfig, ray: RayBase) -> None:
    num_gpus = ray.num_free("GPU")
    if num_gpus >= config.num_devices:
        return
    advice = f"use fewer workers (num_both 1 needs {DEVICES_PER_WORKER}) or set `device` to cpu"
    if config.ray_address:
        where = f"the Ray at {config.ray_address} has {num_gpus} GPUs left"
        where += "" if config.spans_nodes else " on this host"
    elif num_gpus == 0:
        raise ConfigurationError(
            "device cuda needs NVIDIA GPUs, and none is visible here (see nvidia-smi and CUDA_VISIBLE_DEVICES); "
            "set `device` to cpu"
        )
    else:
        where = f"{num_gpus} GPUs here"
    raise ConfigurationError(
        f"device cuda takes {DEVICES_PER_WORKER} GPU for each worker: {config.num_workers} workers, but "
        f"{where}; {advice}"
    )


def has_room(config: ClusterConfig, ray: RayBase, num_joining: int, num_leaving: int) -> bool:
    """Returns whether the joining workers fit before others leave. Raises ConfigurationError: they never fit."""
    needs = {"GPU": DEVICES_PER_WORKER} if config.device == "cuda" else {}
    if config.ray_address:
        needs["CPU"] = 1
    has_room = True
    for resource, each in needs.items():
        free = ray.num_free(resource)
        if free + each * num_leaving < each * num_joining:
            raise ConfigurationError(
                f"no room for {num_joining} more workers: each takes {each} {resource}, and Ray has {free} left"
                + ("" if config.spans_nodes else " on this host")
                + "; ask for fewer, or give Ray more"
            )
        has_room = has_room and free >= each * num_joining
    return has_room
