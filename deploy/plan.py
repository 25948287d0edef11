"""What a cluster's configuration means for its processes, and why it cannot be: all that can be said before any of them
is started."""

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from deploy.cluster_config import ClusterConfig, WorkerPlan
from engine.config import EngineConfig
from engine.kvcache.base import PageLayout, available_memory_bytes
from engine.models.config import ModelConfig
from engine.weights.resolve import model_fingerprint
from router.config import RouterConfig
from router.tokenization import tokenizer_file
from tandem.config import Role
from tandem.rpc.tls import check_tls_files


def check_client_ports(config: ClusterConfig) -> None:
    """Finds out whether the clients' ports and the TLS files can be used.

    Raises:
        ValueError: one cannot; the message says which flag would help.
    """
    for port, flag in ((config.grpc_port, "--grpc-port"), (config.http_port, "--http-port")):
        with socket.socket() as probe:
            # As the servers bind: a port whose last connections are still winding down is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.host, port))
            except OSError as error:
                is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
                advice = f"choose another port with {flag}" if is_port else "choose another address with --host"
                raise ValueError(f"cannot listen on {config.host}:{port}: {error.strerror}; {advice}") from error
    check_tls_files(config.tls_cert, config.tls_key, config.tls_client_ca)


def plan(config: ClusterConfig, model_dir: Path, cluster_token: str) -> tuple[RouterConfig, list[WorkerPlan]]:
    """Turns a cluster's configuration into that of its processes.

    Raises:
        ValueError: it does not fit the model or the memory, or the model is incomplete.
    """
    model_config = ModelConfig.from_dir(model_dir)
    tokenizer_file(model_dir)
    # One thread each where workers are as many as cores: two that share cores wait for each other at every barrier.
    num_threads = max(1, len(os.sched_getaffinity(0)) // config.num_workers)
    engine = config.engine(str(model_dir), num_threads)
    longest = model_config.max_position_embeddings
    if engine.num_pages:
        longest = min(longest, engine.num_pages * engine.page_size)
    max_model_len = config.max_model_len or longest
    if max_model_len > model_config.max_position_embeddings:
        raise ValueError(
            f"max_model_len {max_model_len} is above the model's own limit of {model_config.max_position_embeddings}; "
            "use a smaller --max-model-len, or none"
        )
    if max_model_len > longest:
        raise ValueError(
            f"{engine.num_pages} pages of {engine.page_size} tokens hold {longest} tokens, fewer than "
            f"max_model_len {max_model_len}; use a larger --num-pages or a smaller --max-model-len"
        )
    _check_memory(config.num_workers, engine, model_config)
    fingerprint = model_fingerprint(model_dir, config.load_format)
    router = config.router(str(model_dir), config.model.rstrip("/").rpartition("/")[2], max_model_len, cluster_token)
    workers = [
        config.worker(f"{role}-{i}", role, engine, fingerprint, max_model_len, cluster_token)
        for role, count in _counts(config)
        for i in range(count)
    ]
    return router, workers


def _check_memory(num_workers: int, engine: EngineConfig, model_config: ModelConfig) -> None:
    """Refuses pools that together do not fit: each worker alone would see the same free memory."""
    if engine.device != "cpu":
        # Each worker has a GPU of its own and looks there.
        return
    layout = PageLayout(
        model_config.num_layers, engine.page_size, model_config.num_kv_heads, model_config.head_dim, engine.dtype
    )
    needed = num_workers * engine.num_pages * layout.page_bytes
    available = available_memory_bytes()
    if needed > available:
        raise ValueError(
            f"{num_workers} pools of {engine.num_pages} pages of {layout.page_bytes} bytes need "
            f"{needed / 2**20:.0f} MiB, but only {available / 2**20:.0f} MiB of memory are free; use a smaller "
            f"--num-pages, below {available // (num_workers * layout.page_bytes)}"
        )


def _counts(config: ClusterConfig) -> Iterator[tuple[Role, int]]:
    yield "prefill", config.num_prefill
    yield "decode", config.num_decode
    yield "both", config.num_both
