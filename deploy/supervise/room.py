"""Checks that Ray has room for the workers."""

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.errors import ConfigurationError
from tandem.deploy.on_ray.ray_base import RayBase


def check_num_gpus(config: ClusterConfig, ray: RayBase) -> None:
    if ray.num_free("GPU", config.gpus_per_worker) >= config.num_workers:
        return
    num_gpus = ray.num_free("GPU")
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
    advice = "use fewer workers (num_both 1 needs 1)"
    if num_gpus:
        advice += f", let them share GPUs (workers_per_gpu {-(-config.num_workers // num_gpus)})"
    raise ConfigurationError(
        f"device cuda takes {config.num_gpus} GPUs for {config.num_workers} workers, with workers_per_gpu "
        f"{config.workers_per_gpu}, but {where}; {advice} or set `device` to cpu"
    )


def has_room(config: ClusterConfig, ray: RayBase, num_joining: int, num_leaving: int) -> bool:
    """Returns whether the joining workers fit before others leave. Raises ConfigurationError: they never fit."""
    needs = {"GPU": config.gpus_per_worker} if config.device == "cuda" else {}
    if config.ray_address:
        needs["CPU"] = 1.0
    has_room = True
    for resource, each in needs.items():
        num_fitting = ray.num_free(resource, each)
        if num_fitting + num_leaving < num_joining:
            raise ConfigurationError(
                f"no room for {num_joining} more workers: each takes {each:g} {resource}, and Ray has room for "
                f"{num_fitting}" + ("" if config.spans_nodes else " on this host") + "; ask for fewer, or give Ray more"
            )
        has_room = has_room and num_fitting >= num_joining
    return has_room
