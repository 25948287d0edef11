"""Checks that Ray has room for the workers. The ranks of a worker need it on one host."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tandem.config import Role
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.config.node_choice import PACK, FreeNode, choose_nodes
from tandem.deploy.errors import ConfigurationError
from tandem.deploy.on_ray.ray_base import RayBase
from tandem.deploy.plan import worker_names

Amounts = Mapping[str, float]


class Leaving(NamedTuple):
    """A worker that will free its room. Attributes: node_id: "": on this host, or not placed."""

    role: Role
    node_id: str


def check_num_gpus(config: ClusterConfig, ray: RayBase) -> None:
    free = ray.free()
    if _fit([{"GPU": config.gpus_of(role)} for _, role in worker_names(config)], free):
        return
    num_gpus = ray.num_free("GPU")
    if config.ray_address:
        where = f"the Ray at {config.ray_address} has {num_gpus} GPUs left"
        where += _most_together(free) if config.spans_nodes else " on this host"
    elif num_gpus == 0:
        raise ConfigurationError(
            "`device` cuda needs NVIDIA GPUs, and none is visible here (see nvidia-smi and CUDA_VISIBLE_DEVICES); "
            "set `device` to cpu"
        )
    else:
        where = f"{num_gpus} GPUs here"
    advice = "use fewer workers (num_both 1 needs 1)"
    if num_gpus:
        if config.num_ranks > config.num_workers:
            advice = "use fewer ranks (`tp`)"
        advice += f", let them share GPUs (workers_per_gpu {-(-config.num_ranks // num_gpus)})"
    raise ConfigurationError(
        f"`device` cuda takes {config.num_gpus} GPUs for {config.num_ranks} {_counted(config)}, with workers_per_gpu "
        f"{config.workers_per_gpu}, but {where}; {advice} or set `device` to cpu"
    )


def has_room(
    config: ClusterConfig,
    ray: RayBase,
    joining: Sequence[Role],
    leaving: Sequence[Leaving],
    *,
    may_grow: bool = False,
) -> bool:
    """Returns whether the joining workers fit before others leave.

    Args:
        may_grow: Ray adds nodes, so that workers without room may wait for one.

    Raises:
        ConfigurationError: they never fit.
    """
    needs = [_need(config, role) for role in joining]
    free = ray.free()
    if _fit(needs, free):
        return True
    after = {node_id: dict(amounts) for node_id, amounts in free.items()}
    for worker in leaving:
        amounts = after.get(worker.node_id) or (next(iter(after.values())) if len(after) == 1 else {})
        for resource, amount in _need(config, worker.role).items():
            amounts[resource] = amounts.get(resource, 0.0) + amount
    if may_grow or _fit(needs, after):
        return False
    takes = " or ".join(dict.fromkeys(_text(need, need) for need in needs))
    left = "; ".join(_text(amounts, needs[0]) for amounts in free.values())
    where = ", by host" if config.spans_nodes else " on this host"
    raise ConfigurationError(
        f"no room for {len(needs)} more workers: each takes {takes}, and Ray has {left} left{where}; ask for fewer, or "
        "give Ray more"
    )


def _need(config: ClusterConfig, role: Role) -> Amounts:
    need = {"GPU": config.gpus_of(role)} if config.device == "cuda" else {}
    return need | ({"CPU": float(config.degree_of(role))} if config.ray_address else {})


def _fit(needs: Sequence[Amounts], free: Mapping[str, Amounts]) -> bool:
    if not any(needs):
        return True
    try:
        choose_nodes([FreeNode(node_id, node_id, amounts) for node_id, amounts in free.items()], needs, PACK)
    except ValueError:
        return False
    return True


def _most_together(free: Mapping[str, Amounts]) -> str:
    return f", at most {max(amounts.get('GPU', 0.0) for amounts in free.values()):g} on one host"


def _text(amounts: Amounts, of: Amounts) -> str:
    return ", ".join(f"{amounts.get(resource, 0.0):g} {resource}" for resource in of)


def _counted(config: ClusterConfig) -> str:
    return "ranks of workers" if config.max_degree > 1 else "workers"
