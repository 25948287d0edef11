"""What each room can be told: frozen dataclasses, validated on construction.

Nothing here imports torch: the router and the command line read these too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Role = Literal["prefill", "decode", "both"]
ROLES: tuple[Role, ...] = ("prefill", "decode", "both")
ATTENTION_BACKENDS = ("auto", "flashinfer", "triton", "reference")
GPU_ATTENTION_BACKENDS = ("flashinfer", "triton")
DTYPES = ("float32", "bfloat16")
# Prompts whose chunks one prefill forward computes at most: what sampling their first tokens takes is bounded by it.
MAX_PREFILL_BATCH_SIZE = 128
LOG_LEVELS = ("debug", "info", "warning", "error")
DEVICES = ("cpu", "cuda")
EVICTION_POLICIES = ("lru", "lfu", "fifo", "mru", "priority")
ROUTING_POLICIES = ("round_robin", "least_loaded", "power_of_two", "cache_aware")
PREFILL_POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random")
# Best first.
TRANSPORTS = ("nvlink", "shared_memory", "tcp")
# By the device that the pages lie on.
TRANSPORTS_OF = {"cpu": ("shared_memory", "tcp"), "cuda": ("nvlink",)}


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def require_one_of(config: object, name: str, choices: Sequence[str]) -> None:
    value = getattr(config, name)
    require(value in choices, f"{name} must be one of {', '.join(choices)}, not {value!r}")


def require_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value > 0, f"{name} must be above 0, not {value}")


def require_api_key(key: str) -> None:
    # What travels in a header: anything else would never match.
    require(
        bool(key) and key.isascii() and key.isprintable() and " " not in key,
        "an API key must be printable ASCII without spaces",
    )


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """TLS on the clients' ports.

    Attributes:
        cert_file, key_file: PEM files: the server's certificate chain and its private key.
        client_ca_file: PEM file; if set, a client must show a certificate that one of these authorities signed.
    """

    cert_file: str
    key_file: str
    client_ca_file: str = ""

    def __post_init__(self) -> None:
        require(bool(self.cert_file and self.key_file), "TLS needs both a certificate and a key")


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What a process writes about itself.

    Attributes:
        level: debug adds a line for every batch.
        directory: where each process has its file; empty: standard error.
    """

    level: str = "info"
    directory: str = ""

    def __post_init__(self) -> None:
        require_one_of(self, "level", LOG_LEVELS)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One model on one device.

    Attributes:
        model_dir: a local Hugging Face directory.
        load_format: "auto" reads the checkpoint; "dummy" makes random weights for the config.
        num_pages: size of the pool, in pages; 0, on a GPU alone: as many as mem_fraction_static leaves room for.
        num_threads: CPU threads of one forward; 0 leaves torch's choice.
        attention_backend: auto takes FlashInfer on a GPU where it has kernels for the dtype, else the reference.
        cuda_graph_max_bs: decode batches up to this size run as CUDA graphs; 0: none do.
        mem_fraction_static: the share of the GPU's memory, between 0 and 1, that weights, graphs and pool together may
            take; the rest is for what forwards need while they run. Read if num_pages is 0.
        max_chunk_tokens: tokens of the largest prefill forward; 0: there is none. A GPU keeps memory for it.
        max_batch_size: sequences of the largest decode step; 0: there is none. Likewise.
        max_model_len: tokens of the longest sequence, which the pool must hold; 0: the model's own limit, or what the
            pool holds if that is less.
    """

    model_dir: str
    load_format: Literal["auto", "dummy"] = "auto"
    device: str = "cpu"
    dtype: str = "float32"
    page_size: int = 16
    num_pages: int = 1024
    num_threads: int = 0
    attention_backend: str = "auto"
    cuda_graph_max_bs: int = 256
    mem_fraction_static: float = 0.88
    max_chunk_tokens: int = 512
    max_batch_size: int = 64
    max_model_len: int = 0

    def __post_init__(self) -> None:
        require_one_of(self, "attention_backend", ATTENTION_BACKENDS)
        require(
            self.device != "cpu" or self.attention_backend not in GPU_ATTENTION_BACKENDS,
            f"attention_backend {self.attention_backend} needs a GPU: use reference, or device cuda",
        )
        for name in ("cuda_graph_max_bs", "max_chunk_tokens", "max_batch_size", "max_model_len"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, but is {getattr(self, name)}")
        require(
            0 < self.mem_fraction_static < 1,
            f"mem_fraction_static must be between 0 and 1, not {self.mem_fraction_static}",
        )
        require(
            self.load_format in ("auto", "dummy"),
            f"load_format must be auto or dummy, not {self.load_format!r}",
        )
        require(self.device in DEVICES, f"device must be one of {', '.join(DEVICES)}, not {self.device!r}")
        require(self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        require_positive(self, "page_size")
        if self.num_pages != 0 or self.device != "cuda":
            require_positive(self, "num_pages")
        require(self.num_threads >= 0, f"num_threads must not be negative, but is {self.num_threads}")


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """The prefill scheduler.

    Attributes:
        chunk_size: prompt tokens that one forward computes at most, over all its requests.
        policy: which queued request starts next: fcfs (first come first served), lpm (longest cached prefix),
            dfs-weight (depth first through shared prefixes), lof (longest output first) or random. Priority goes
            before it.
        min_shared_tokens: a request waits for another that is computing at least so many tokens of its prefix.
        grant_timeout_s: how long a finished prefill waits for pages at the decode worker before the router is asked
            to find another one; what was computed stays in the cache.
        overlap: on an asynchronous engine a forward is launched before the results of the one before are known.
    """

    chunk_size: int = 512
    policy: str = "fcfs"
    min_shared_tokens: int = 32
    grant_timeout_s: float = 60.0
    overlap: bool = True

    def __post_init__(self) -> None:
        require_positive(self, "chunk_size", "min_shared_tokens", "grant_timeout_s")
        require_one_of(self, "policy", PREFILL_POLICIES)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """The decode scheduler.

    Attributes:
        max_batch_size: requests in one step at most.
        lease_duration_s: how long a lease lasts without a word from the prefill worker.
        admit_grace_s: how long a lease request may wait for its Admit, which comes on another stream.
        overlap: on an asynchronous engine a step is launched before the tokens of the one before are known.
    """

    max_batch_size: int = 64
    lease_duration_s: float = 30.0
    admit_grace_s: float = 2.0
    overlap: bool = True

    def __post_init__(self) -> None:
        require_positive(self, "max_batch_size", "lease_duration_s", "admit_grace_s")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker process.

    Attributes:
        worker_id: its name in the cluster; a restarted worker keeps it.
        model_fingerprint: equal exactly where weights are equal.
        max_model_len: prompt and output tokens together, at most.
        eviction: which cached page goes first when room is needed.
        transports: ways for KV pages to travel, best first; a link takes the sender's best that both ends have.
        host: the address its ports are bound to.
        heartbeat_interval_s: seconds between heartbeats to the router.
        stall_timeout_s: time without a scheduler step after which the process ends itself, to be started again.
        connect_timeout_s: how long it looks for the router before it gives up.
        cluster_token: what the processes of this cluster know each other by.
        api_keys: what readers of its metrics show; empty lets everybody in.
    """

    worker_id: str
    role: Role
    engine: EngineConfig
    model_fingerprint: str
    max_model_len: int
    prefill: PrefillConfig = field(default_factory=PrefillConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    eviction: str = "lru"
    transports: tuple[str, ...] = TRANSPORTS
    host: str = "127.0.0.1"
    heartbeat_interval_s: float = 0.25
    stall_timeout_s: float = 60.0
    connect_timeout_s: float = 60.0
    cluster_token: str = field(default="", repr=False)
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        require(self.role in ROLES, f"role must be one of {', '.join(ROLES)}, not {self.role!r}")
        require_one_of(self, "eviction", EVICTION_POLICIES)
        for name in self.transports:
            require(name in TRANSPORTS, f"transports must be among {', '.join(TRANSPORTS)}, not {name!r}")
        require(len(self.transports) > 0, "at least one transport is needed")
        require_positive(self, "max_model_len", "heartbeat_interval_s", "stall_timeout_s", "connect_timeout_s")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The router process.

    Attributes:
        model_dir: where tokenizer, chat template and limits are read from.
        model_name: what clients call the model.
        host: the address of the clients' two ports.
        grpc_port, http_port: the clients' ports; 0 picks a free one.
        api_keys: what clients show; empty lets everybody in.
        max_requests_per_key: requests in hand for each key at most, for all clients together without keys; 0: any
            number.
        max_body_bytes: of a request, over either port.
        tls: on the clients' ports; None: plain.
        cluster_token: what the processes of this cluster know each other by.
        cluster_port: the workers' port; 0 picks a free one.
        cluster_host: the address of that port, for workers alone.
        heartbeat_timeout_s: silence after which a worker counts as lost.
        stall_timeout_s: time without a scheduler step after which a worker counts as lost though it talks.
        routing: who serves a request: round_robin, least_loaded, power_of_two, or cache_aware.
        max_queued_requests: requests that wait for their first token at most; further ones are refused at once.
        request_timeout_s: a request that takes longer fails.
        decode_word_timeout_s: how long the router waits for the decode worker's word on a request whose prefill
            worker died after the first token.
        max_attempts: failed attempts after which a request fails for good.
        admit_duration_s: how long a decode worker remembers a request that has no lease yet.
    """

    model_dir: str
    model_name: str
    max_model_len: int
    host: str = "127.0.0.1"
    grpc_port: int = 50051
    http_port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_requests_per_key: int = 0
    max_body_bytes: int = 8 * 2**20
    tls: TlsConfig | None = None
    cluster_token: str = field(default="", repr=False)
    cluster_port: int = 0
    cluster_host: str = "127.0.0.1"
    heartbeat_timeout_s: float = 3.0
    stall_timeout_s: float = 60.0
    routing: str = "least_loaded"
    max_queued_requests: int = 1024
    request_timeout_s: float = 3600.0
    decode_word_timeout_s: float = 2.0
    max_attempts: int = 8
    admit_duration_s: float = 600.0
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        for name in ("grpc_port", "http_port", "cluster_port"):
            port = getattr(self, name)
            require(0 <= port < 65536, f"{name} must be between 0 and 65535, not {port}")
        require_one_of(self, "routing", ROUTING_POLICIES)
        for key in self.api_keys:
            require_api_key(key)
        require(self.max_requests_per_key >= 0, "max_requests_per_key must not be negative")
        require_positive(
            self,
            "max_model_len",
            "heartbeat_timeout_s",
            "stall_timeout_s",
            "max_attempts",
            "admit_duration_s",
            "max_queued_requests",
            "request_timeout_s",
            "max_body_bytes",
        )
