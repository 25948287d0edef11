"""Checks that Ray has room for the workers."""

from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.errors import ConfigurationError
from tandem.deploy.on_ray.ray_base import RayBase


def check_num_gpus(config: ClusterConfig, ray: RayBase) -> None:
    if ray.num_free("GPU", config.gpus_per_rank) >= config.num_ranks:
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
        if config.num_ranks > config.num_workers:
            advice = "use fewer ranks (tp)"
        advice += f", let them share GPUs (workers_per_gpu {-(-config.num_ranks // num_gpus)})"
    raise ConfigurationError(
        f"device cuda takes {config.num_gpus} GPUs for {config.num_ranks} {_counted(config)}, with workers_per_gpu "
        f"{config.workers_per_gpu}, but {where}; {advice} or set `device` to cpu"
    )


def has_room(config: ClusterConfig, ray: RayBase, num_joining: int, num_leaving: int) -> bool:
    """Returns whether the joining workers' ranks fit before others leave. Raises ConfigurationError: they never fit."""
    needs = {"GPU": config.gpus_per_rank} if config.device == "cuda" else {}
    if config.ray_address:
        needs["CPU"] = 1.0
    has_room = True
    for resource, each in needs.items():
        num_fitting = ray.num_free(resource, each)
        if num_fitting + num_leaving < num_joining:
            raise ConfigurationError(
                f"no room for {num_joining} more {_counted(config)}: each takes {each:g} {resource}, and Ray "
                f"has room for {num_fitting}"
                + ("" if config.spans_nodes else " on this host")
                + "; ask for fewer, or give Ray more"
            )
        has_room = has_room and num_fitting >= num_joining
    return has_room


def _counted(config: ClusterConfig) -> str:
    return "ranks of workers" if config.max_degree > 1 else "workers"
