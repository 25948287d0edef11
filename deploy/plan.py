"""Turns a cluster's configuration into its processes', and checks it against model and memory."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tandem.choices import Choices, is_path
from tandem.config import Role
from tandem.deploy.config.cluster_config import ClusterConfig, WorkerPlan
from tandem.deploy.drafter import check_drafter
from tandem.deploy.host.ports import ClusterPorts
from tandem.engine.attention.table import ATTENTION_BACKENDS
from tandem.engine.config import EngineConfig
from tandem.engine.draft_models.config import engine_page_layout
from tandem.engine.kvcache.eviction.table import EVICTION_POLICIES
from tandem.engine.kvcache.host_memory import available_memory_bytes
from tandem.engine.memory_needs import check_memory
from tandem.engine.models.config import ModelConfig
from tandem.engine.ranks.checks import check_degree
from tandem.kvtransfer.transports.table import TRANSPORTS
from tandem.pagestore.region import check_region
from tandem.prefill_worker.policies.table import PREFILL_POLICIES
from tandem.router.config import RouterConfig
from tandem.router.policies.table import ROUTING_POLICIES
from tandem.router.text.chat_template import read_chat_template
from tandem.router.text.tokenizer import tokenizer_file
from tandem.router.text.tool_parsers.table import TOOL_PARSERS

# Room in the files of a page store for what is not pages.
_SEGMENT_BYTES = 2**16


class PoolsOfNode(NamedTuple):
    """
    Attributes:
        node: address of the node; "": this host.
        available_bytes: memory free for the pools.
    """

    node: str
    num_pools: int
    available_bytes: int


class WorkerNodes(Protocol):
    def num_threads(self, worker: str) -> int:
        """Returns the default number of CPU threads of a worker."""

    def pools(self) -> list[PoolsOfNode]:
        """Returns the pools of the workers that the cluster starts with."""


def check_own_classes(config: ClusterConfig) -> None:
    """Loads the classes that the configuration names by import path. Raises ValueError: one cannot be used."""
    tables: tuple[tuple[Choices[Any], str], ...] = (
        (TRANSPORTS, config.transport),
        (ATTENTION_BACKENDS, config.attention_backend),
        (PREFILL_POLICIES, config.schedule),
        (EVICTION_POLICIES, config.eviction),
        (ROUTING_POLICIES, config.routing),
        (TOOL_PARSERS, config.tool_parser),
    )
    for table, name in tables:
        if is_path(name):
            table.load(name)


def check_num_threads(config: ClusterConfig, num_cpus: int, where: str) -> None:
    """Raises ValueError: num_threads is above the number of CPUs there."""
    if config.num_threads > num_cpus:
        raise ValueError(
            f"num_threads is {config.num_threads}, but {where} has {num_cpus} CPUs for the cluster: use a num_threads "
            f"of at most {num_cpus}, or none for an even share of them"
        )


def plan(
    config: ClusterConfig,
    model_dir: Path,
    cluster_token: str,
    ports: ClusterPorts,
    num_running: int | None = None,
    nodes: WorkerNodes | None = None,
    untouched_bytes: int = 0,
    num_ranks: int = 0,
) -> tuple[list[RouterConfig], list[WorkerPlan]]:
    """Returns the configurations of all routers and all workers.

    Args:
        num_running: workers that are running already, with their pools; None: the cluster starts.
        nodes: the workers' nodes; None: this host.
        untouched_bytes: without `nodes`, memory of this host that a running page store will still take.
        num_ranks: ranks that share this host's CPUs; 0: those of the largest cluster within the bounds.

    Raises:
        ValueError: the configuration does not fit model or memory, or model or chat template cannot be used.
    """
    model_dir = model_dir.absolute()
    model_config = ModelConfig.from_dir(model_dir)
    tokenizer_file(model_dir)
    if config.chat_template:
        read_chat_template(Path(config.chat_template))
    # No two workers share a core: threads would wait for each other at every barrier.
    num_threads = max(1, len(os.sched_getaffinity(0)) // (num_ranks or config.largest.num_ranks))
    engine = config.engine(str(model_dir), num_threads)
    longest = model_config.max_position_embeddings
    if engine.num_pages:
        # With --workers, prompts computed for other workers may take the other half.
        pages_of_one = engine.num_pages // 2 if config.most("any") else engine.num_pages
        longest = min(longest, pages_of_one * engine.page_size)
    max_model_len = config.max_model_len or longest
    if max_model_len > model_config.max_position_embeddings:
        raise ValueError(
            f"max_model_len {max_model_len} is above the model's own limit of {model_config.max_position_embeddings}; "
            "use a smaller max_model_len, or none"
        )
    if max_model_len > longest:
        raise ValueError(
            f"{engine.num_pages} pages of {engine.page_size} tokens hold {longest} tokens, fewer than "
            f"max_model_len {max_model_len}; use a larger num_pages or a smaller max_model_len"
        )
    if nodes:
        # A worker added to a cluster over several nodes checks its memory itself: its node is not chosen yet.
        pools = (
            []
            if num_running is not None
            else [_beside_store(config, engine, model_config, node) for node in nodes.pools()]
        )
    else:
        here = PoolsOfNode("", max(0, config.num_workers - (num_running or 0)), available_memory_bytes())
        if num_running is not None:
            pools = [here._replace(available_bytes=here.available_bytes - untouched_bytes)]
        else:
            pools = [_beside_store(config, engine, model_config, here)]
    _check_degrees(config, engine, model_config)
    check_drafter(engine, model_config)
    # So does a GPU worker.
    if engine.device == "cpu":
        _check_memory(pools, replace(engine, degree=config.max_degree), model_config)
    router = config.router(str(model_dir), config.model.rstrip("/").rpartition("/")[2], max_model_len, cluster_token)
    num_threads_of = nodes.num_threads if nodes and not config.num_threads else None
    workers = [
        config.worker(name, role, _with_threads(engine, name, num_threads_of), max_model_len, cluster_token)
        for name, role in worker_names(config)
    ]
    router = replace(router, workers={w.worker.worker_id: w.worker.role for w in workers})
    return ports.configs(router), workers


def _check_memory(nodes: Iterable[PoolsOfNode], engine: EngineConfig, model_config: ModelConfig) -> None:
    """Refuses weights and pools that do not fit together. Each worker alone would see all free memory of its host."""
    layout = engine_page_layout(engine, model_config)
    for node, num_pools, available in nodes:
        where = f"node {node}: " if node else ""
        if num_pools:
            # Ranks may hold copies of heads, the more so the more they are.
            check_memory(
                engine, model_config, layout, available, num_workers=num_pools, num_ranks=engine.degree, where=where
            )


def _check_degrees(config: ClusterConfig, engine: EngineConfig, model_config: ModelConfig) -> None:
    """Raises ValueError: the model cannot be cut into the ranks of some worker."""
    quantized = model_config.quantized(engine.quantization)
    for degree in sorted({config.degree_of(role) for _, role in worker_names(config.largest)}):
        check_degree(quantized, degree)


def _beside_store(
    config: ClusterConfig, engine: EngineConfig, model_config: ModelConfig, pools: PoolsOfNode
) -> PoolsOfNode:
    """Takes the page store's memory from that of a node. Raises ValueError: there is not enough, or the store cannot
    hold a page."""
    if not config.store_memory:
        return pools
    try:
        check_region(config.store_memory_bytes, pools.available_bytes)
    except ValueError as error:
        raise ValueError(f"node {pools.node}: {error}" if pools.node else str(error)) from None
    layout = engine_page_layout(engine, model_config)
    if config.store_memory_bytes < layout.page_bytes:
        raise ValueError(
            f"store_memory {config.store_memory} holds no page of {layout.page_bytes} bytes: use a larger store_memory"
        )
    if config.disk is not None and config.disk.num_bytes < _SEGMENT_BYTES + 2 * layout.page_bytes:
        raise ValueError(
            f"store_disk {config.store_disk} is too small for pages of {layout.page_bytes} bytes: use a larger size"
        )
    return pools._replace(available_bytes=pools.available_bytes - config.store_memory_bytes)


def check_before_fetching(config: ClusterConfig, model_dir: Path) -> None:
    """Checks a model of which only the configuration is there. Raises ValueError: it cannot be served, or does not fit
    into this host's memory."""
    model_config = ModelConfig.from_dir(model_dir)
    engine = config.engine(str(model_dir), 1)
    _check_degrees(config, engine, model_config)
    check_drafter(engine, model_config)
    if engine.device == "cpu" and not config.spans_nodes:
        here = PoolsOfNode("", config.num_workers, available_memory_bytes())
        pools = [_beside_store(config, engine, model_config, here)]
        _check_memory(pools, replace(engine, degree=config.max_degree), model_config)


def worker_names(config: ClusterConfig) -> Iterator[tuple[str, Role]]:
    counts: tuple[tuple[Role, int], ...] = (
        ("prefill", config.num_prefill),
        ("decode", config.num_decode),
        ("both", config.num_both),
    )
    yield from ((f"{role}-{i}", role) for role, count in counts for i in range(count))
    yield from ((f"worker-{i}", "both") for i in range(config.num_any))


def role_of(worker: str) -> Role:
    """Returns the role of a worker by its name, which `worker_names` made."""
    kind = worker.rpartition("-")[0]
    roles: dict[str, Role] = {"prefill": "prefill", "decode": "decode"}
    return roles.get(kind, "both")


def router_names(config: ClusterConfig) -> list[str]:
    return [f"router-{i}" for i in range(config.num_routers_started)]


def _with_threads(engine: EngineConfig, worker: str, num_threads_of: Callable[[str], int] | None) -> EngineConfig:
    return replace(engine, num_threads=num_threads_of(worker)) if num_threads_of else engine
