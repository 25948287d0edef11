"""What a cluster's configuration means for its processes, and why it cannot be: all that can be said before any of them
is started."""

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from router.tokenization import tokenizer_file
from tandem.cluster_config import ClusterConfig
from tandem.config import Role, RouterConfig, WorkerConfig
from tandem.engine.kvcache.base import PageLayout, available_memory_bytes
from tandem.engine.models.config import ModelConfig
from tandem.engine.weights.resolve import model_fingerprint
from tandem.rpc.tls import check_tls_files


def check_front_door(config: ClusterConfig) -> None:
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


def plan(config: ClusterConfig, model_dir: Path, cluster_token: str) -> tuple[RouterConfig, list[WorkerConfig]]:
    """Turns a cluster's configuration into that of its processes.

    Raises:
        ValueError: it does not fit the model or the memory, or the model is incomplete.
    """
    model_config = ModelConfig.from_dir(model_dir)
    tokenizer_file(model_dir)
    pool_tokens = config.num_pages * config.page_size
    max_model_len = config.max_model_len or min(model_config.max_position_embeddings, pool_tokens)
    if max_model_len > model_config.max_position_embeddings:
        raise ValueError(
            f"max_model_len {max_model_len} is above the model's own limit of {model_config.max_position_embeddings}; "
            "use a smaller --max-model-len, or none"
        )
    if max_model_len > pool_tokens:
        raise ValueError(
            f"{config.num_pages} pages of {config.page_size} tokens hold {pool_tokens} tokens, fewer than "
            f"max_model_len {max_model_len}; use a larger --num-pages or a smaller --max-model-len"
        )
    _check_memory(config, model_config)
    # One thread each where workers are as many as cores: two that share cores wait for each other at every barrier.
    num_threads = max(1, len(os.sched_getaffinity(0)) // config.num_workers)
    engine = config.engine(str(model_dir), num_threads)
    fingerprint = model_fingerprint(model_dir, config.load_format)
    router = config.router(str(model_dir), config.model.rstrip("/").rpartition("/")[2], max_model_len, cluster_token)
    workers = [
        config.worker(f"{role}-{i}", role, engine, fingerprint, max_model_len, cluster_token)
        for role, count in _counts(config)
        for i in range(count)
    ]
    return router, workers


def _check_memory(config: ClusterConfig, model_config: ModelConfig) -> None:
    """Refuses pools that together do not fit: each worker alone would see the same free memory."""
    if config.device != "cpu":
        # Each worker has a GPU of its own and looks there.
        return
    layout = PageLayout(
        model_config.num_layers, config.page_size, model_config.num_kv_heads, model_config.head_dim, config.dtype
    )
    needed = config.num_workers * config.num_pages * layout.page_bytes
    available = available_memory_bytes()
    if needed > available:
        raise ValueError(
            f"{config.num_workers} pools of {config.num_pages} pages of {layout.page_bytes} bytes need "
            f"{needed / 2**20:.0f} MiB, but only {available / 2**20:.0f} MiB of memory are free; use a smaller "
            f"--num-pages, below {available // (config.num_workers * layout.page_bytes)}"
        )


def _counts(config: ClusterConfig) -> Iterator[tuple[Role, int]]:
    yield "prefill", config.num_prefill
    yield "decode", config.num_decode
    yield "both", config.num_both
