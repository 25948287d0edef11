"""A whole cluster on one host, and what it means for each of its processes.

Nothing here imports torch: the command line reads this too.
"""

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from tandem.config import (
    DTYPES,
    TRANSPORTS,
    TRANSPORTS_OF,
    DecodeConfig,
    EngineConfig,
    LogConfig,
    PrefillConfig,
    Role,
    RouterConfig,
    TlsConfig,
    WorkerConfig,
    require,
    require_one_of,
    require_positive,
)


class DeviceDefaults(NamedTuple):
    """What a worker does that is not told. Attributes: num_pages: 0: as many as fit."""

    dtype: str
    num_pages: int
    chunk_size: int
    max_batch_size: int


CPU_DEFAULTS = DeviceDefaults("float32", num_pages=1024, chunk_size=512, max_batch_size=64)
# A GPU computes thousands of prompt tokens in the time of a few hundred; prompts that long fill its matrix units.
GPU_DEFAULTS = DeviceDefaults("bfloat16", num_pages=0, chunk_size=8192, max_batch_size=256)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """A whole cluster on one host, as `tandem serve` starts it.

    Attributes:
        model: a Hugging Face directory, a hub id, a GGUF file, a config directory (with load_format "dummy"), or the
            built-in name smollm2-135m-instruct.
        num_prefill, num_decode, num_both: workers of each role.
        max_model_len: prompt and output tokens together; 0 takes the model's own limit, or what a pool of num_pages
            holds if that is less.
        dtype: of weights and KV pages; "auto" depends on the device, as do the next three if they are 0.
        num_pages: pages in each worker's pool; on a GPU 0 is as many as mem_fraction_static leaves room for.
        chunk_size, max_batch_size: as in PrefillConfig and DecodeConfig.
        attention_backend, cuda_graph_max_bs, mem_fraction_static: as in EngineConfig.
        disable_overlap_schedule: forwards of a scheduler follow one another, as on a CPU.
        schedule: the prefill workers' policy.
        host: the address of the clients' ports; what the processes say to each other stays on loopback.
        grpc_port, http_port: the clients' ports; 0 picks a free one.
        api_keys, max_requests_per_key, max_body_bytes, max_queued_requests, request_timeout_s: as in RouterConfig.
        tls_cert, tls_key, tls_client_ca: as in TlsConfig; all empty: no TLS.
        drain_timeout_s: how long running requests get to finish once the cluster is asked to stop.
        log_level, log_dir: as in LogConfig.
        transport: how KV pages travel; "auto" takes the best that both ends of a link have.
    """

    model: str
    load_format: Literal["auto", "dummy"] = "auto"
    num_prefill: int = 1
    num_decode: int = 1
    num_both: int = 0
    device: str = "cpu"
    dtype: str = "auto"
    page_size: int = 16
    num_pages: int = 0
    mem_fraction_static: float = 0.88
    max_model_len: int = 0
    num_threads: int = 0
    attention_backend: str = "auto"
    cuda_graph_max_bs: int = 256
    chunk_size: int = 0
    max_batch_size: int = 0
    disable_overlap_schedule: bool = False
    schedule: str = "fcfs"
    eviction: str = "lru"
    routing: str = "least_loaded"
    transport: str = "auto"
    host: str = "127.0.0.1"
    grpc_port: int = 50051
    http_port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_requests_per_key: int = 0
    max_body_bytes: int = 8 * 2**20
    max_queued_requests: int = 1024
    request_timeout_s: float = 3600.0
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    drain_timeout_s: float = 30.0
    log_level: str = "info"
    log_dir: str = ""

    def __post_init__(self) -> None:
        counts = ("num_prefill", "num_decode", "num_both", "num_pages", "chunk_size", "max_batch_size")
        for name in (*counts, "max_model_len", "num_threads", "drain_timeout_s"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, but is {getattr(self, name)}")
        require_positive(self, "page_size")
        require_one_of(self, "dtype", ("auto", *DTYPES))
        require(
            not self.grpc_port or self.grpc_port != self.http_port,
            f"grpc_port and http_port are both {self.grpc_port}",
        )
        require(bool(self.tls_cert) == bool(self.tls_key), "TLS needs both tls_cert and tls_key")
        require(
            not self.tls_client_ca or bool(self.tls_cert),
            "tls_client_ca asks clients for certificates over TLS: it needs tls_cert and tls_key",
        )
        require(
            (self.num_prefill > 0) == (self.num_decode > 0),
            f"{self.num_prefill} prefill and {self.num_decode} decode workers: both kinds are needed, or neither",
        )
        require(self.num_workers > 0, "at least one worker is needed: --prefill and --decode, or --both")
        # What its processes would refuse is refused before any of them starts.
        self.engine("unresolved")
        require_one_of(self, "transport", ("auto", *TRANSPORTS))
        possible = ("auto", *TRANSPORTS_OF[self.device])
        require(
            self.transport in possible,
            f"transport {self.transport} does not work with device {self.device}: use one of {', '.join(possible)}",
        )
        self.router("unresolved", self.model, 1)
        self.worker("unresolved", "both", self.engine("unresolved"), "", 1)

    def engine(self, model_dir: str, num_threads: int = 0) -> EngineConfig:
        """What each worker's engine is told."""
        return EngineConfig(
            model_dir=model_dir,
            load_format=self.load_format,
            device=self.device,
            dtype=self._device_defaults.dtype if self.dtype == "auto" else self.dtype,
            page_size=self.page_size,
            num_pages=self.num_pages or self._device_defaults.num_pages,
            num_threads=self.num_threads or num_threads,
            attention_backend=self.attention_backend,
            cuda_graph_max_bs=self.cuda_graph_max_bs,
            mem_fraction_static=self.mem_fraction_static,
        )

    @property
    def _device_defaults(self) -> DeviceDefaults:
        return CPU_DEFAULTS if self.device == "cpu" else GPU_DEFAULTS

    def router(self, model_dir: str, model_name: str, max_model_len: int, cluster_token: str = "") -> RouterConfig:
        """What the router is told."""
        return RouterConfig(
            model_dir=model_dir,
            model_name=model_name,
            max_model_len=max_model_len,
            routing=self.routing,
            host=self.host,
            grpc_port=self.grpc_port,
            http_port=self.http_port,
            api_keys=self.api_keys,
            max_requests_per_key=self.max_requests_per_key,
            max_body_bytes=self.max_body_bytes,
            max_queued_requests=self.max_queued_requests,
            request_timeout_s=self.request_timeout_s,
            tls=TlsConfig(self.tls_cert, self.tls_key, self.tls_client_ca) if self.tls_cert or self.tls_key else None,
            cluster_token=cluster_token,
            log=LogConfig(self.log_level, self.log_dir),
        )

    def worker(
        self,
        worker_id: str,
        role: Role,
        engine: EngineConfig,
        fingerprint: str,
        max_model_len: int,
        cluster_token: str = "",
    ) -> WorkerConfig:
        """What one worker is told."""
        chunk_size = self.chunk_size or self._device_defaults.chunk_size
        max_batch_size = self.max_batch_size or self._device_defaults.max_batch_size
        largest_step = 0 if role == "prefill" else max_batch_size
        engine = replace(
            engine,
            # Graphs are of decode steps.
            cuda_graph_max_bs=min(engine.cuda_graph_max_bs, largest_step),
            max_chunk_tokens=0 if role == "decode" else chunk_size,
            max_batch_size=largest_step,
            max_model_len=max_model_len,
        )
        return WorkerConfig(
            worker_id=worker_id,
            role=role,
            engine=engine,
            model_fingerprint=fingerprint,
            max_model_len=max_model_len,
            prefill=PrefillConfig(chunk_size, self.schedule, overlap=not self.disable_overlap_schedule),
            decode=DecodeConfig(max_batch_size=max_batch_size, overlap=not self.disable_overlap_schedule),
            eviction=self.eviction,
            transports=TRANSPORTS if self.transport == "auto" else (self.transport,),
            cluster_token=cluster_token,
            api_keys=self.api_keys,
            log=LogConfig(self.log_level, self.log_dir),
        )

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode + self.num_both
