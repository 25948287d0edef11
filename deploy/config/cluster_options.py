"""The options of `tandem serve`, with their help. Imports no torch: the command line reads this too."""

from dataclasses import MISSING, dataclass
from typing import NamedTuple

from tandem.config import LOG_LEVELS, SERVER_NAME, LogConfig, TlsConfig, default_of
from tandem.decode_worker.config import DecodeConfig, DecodeOptions
from tandem.deploy.config.node_choice import HOST, PLACEMENT_STRATEGIES
from tandem.deploy.config.options import options_of
from tandem.engine.config import DTYPES, EngineConfig, EngineOptions
from tandem.kvtransfer.transports import table as transports
from tandem.options import option
from tandem.prefill_worker.config import PrefillConfig, PrefillOptions
from tandem.router.config import RouterConfig, RouterOptions
from tandem.router.policies.table import ROUTING_POLICIES

SECURITY = "security"
GROUPS = {
    "model": (
        "model",
        "served_model_name",
        "load_format",
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "max_model_len",
        "generation_config",
        "chat_template",
        "tool_parser",
        "reasoning_parser",
        "open_objects",
    ),
    "workers": (
        "num_prefill",
        "num_decode",
        "num_both",
        "num_any",
        "tp",
        "prefill_tp",
        "decode_tp",
        "device",
        "workers_per_gpu",
        "num_threads",
        "transport",
        "attention_backend",
        "cuda_graph_max_bs",
    ),
    "adapters": (
        "lora",
        "lora_root",
        "max_loras",
        "max_lora_rank",
        "lora_host_memory",
        "admin_keys",
    ),
    "memory and scheduling": (
        "page_size",
        "num_pages",
        "mem_fraction_static",
        "chunk_size",
        "max_batch_size",
        "mixed_steps",
        "disable_overlap_schedule",
        "speculation",
        "speculation_shared",
        "schedule",
        "eviction",
        "store_memory",
        "store_disk",
        "store_write_after",
        "store_namespace_share",
        "routing",
        "placement",
        "ttft_objective_ms",
        "itl_objective_ms",
    ),
    "clients' ports": (
        "num_routers",
        "host",
        "grpc_port",
        "http_port",
        "allowed_origins",
        "root_path",
        "max_body_bytes",
        "max_bytes_in_hand",
        "max_connections",
        "max_queued_requests",
        "request_timeout_s",
        "worker_wait_timeout_s",
        "allow_cache_reset",
        "otlp_endpoint",
        "allow_tracing",
    ),
    SECURITY: (
        "api_keys",
        "max_requests_per_key",
        "share_cache_between_keys",
        "max_priority",
        "tls_cert",
        "tls_key",
        "tls_client_ca",
        "internal_tls",
        "internal_tls_ca",
        "internal_tls_cert",
        "internal_tls_key",
    ),
    "operation": (
        "cluster_name",
        "drain_timeout_s",
        "ray_address",
        "placement_strategy",
        "ray_autoscaler",
        "node_timeout_s",
        "interface",
        "ship_code",
        "log_level",
        "log_requests",
        "log_dir",
    ),
}


class DeviceDefaults(NamedTuple):
    """Defaults that depend on the device. Attributes: num_pages: 0: as many as fit."""

    dtype: str
    num_pages: int
    chunk_size: int
    max_batch_size: int


DEVICE_DEFAULTS = {
    "cpu": DeviceDefaults(
        default_of(EngineConfig, "dtype"),
        default_of(EngineConfig, "num_pages"),
        default_of(PrefillConfig, "chunk_size"),
        default_of(DecodeConfig, "max_batch_size"),
    ),
    # A GPU computes thousands of prompt tokens in the time of a few hundred.
    "cuda": DeviceDefaults("bfloat16", num_pages=0, chunk_size=8192, max_batch_size=256),
}
DEFAULT_NAME = "tandem"
CPU, GPU = DEVICE_DEFAULTS["cpu"], DEVICE_DEFAULTS["cuda"]
SWITCH = AUTO, ON, OFF = ("auto", "on", "off")


def _transports_for(device: str) -> str:
    return ", ".join(f"`{name}`" for name in transports.TRANSPORTS.for_device(device))


@dataclass(frozen=True, slots=True)
class ClusterOptions(PrefillOptions, DecodeOptions, EngineOptions, RouterOptions):
    """All options; ClusterConfig checks their values.

    Each package declares the options that its processes take as given. The launcher interprets the options here.
    """

    model: str = option(
        MISSING,
        "directory, hub id such as org/name, .gguf file, or smollm2-135m-instruct",
        metavar="MODEL",
        detail="; the only required option",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "name of the model for clients, repeatable; answers carry the first",
        metavar="NAME",
        shown="the model's own",
    )
    lora: tuple[str, ...] = option(
        (),
        "name and PEFT directory of a LoRA adapter that requests choose as their model, repeatable",
        metavar="NAME=PATH",
        shown="none",
        detail=" ([adapters.md](adapters.md))",
    )
    lora_root: str = option(
        "",
        "directory below which adapters may be loaded while the cluster serves, the same on every host",
        metavar="DIRECTORY",
        shown="none: only those of --lora",
        detail=" ([adapters.md](adapters.md#loading-and-unloading))",
    )
    dtype: str = option(
        "auto",
        "dtype of weights, and of KV pages without --kv-cache-dtype; auto: bfloat16 on a GPU, float32 on a CPU",
        choices=("auto", *DTYPES),
    )
    num_prefill: int = option(
        1,
        "prefill workers; LOW:HIGH, such as 1:4: as many as the load needs, in these bounds",
        name="prefill",
        metavar="N",
        shown="1, or 0 with --both or --workers",
        takes_bounds=True,
        detail=" ([elastic.md](elastic.md))",
    )
    num_decode: int = option(
        1,
        "decode workers, or LOW:HIGH",
        name="decode",
        metavar="N",
        shown="1, or 0 with --both or --workers",
        takes_bounds=True,
    )
    num_both: int = option(
        0, "workers that prefill and decode, or LOW:HIGH", name="both", metavar="N", takes_bounds=True
    )
    num_any: int = option(
        0,
        "linked workers that prefill and decode, in place of the other three: for each request, the routers choose the "
        "worker that computes its prompt and the one that decodes it; or LOW:HIGH",
        name="workers",
        metavar="N",
        takes_bounds=True,
        detail=" ([placement.md](placement.md))",
    )
    tp: int = option(
        1,
        "ranks of each worker: processes on one host, each with a part of the model and, on GPUs, a GPU",
        metavar="N",
        detail=" ([ranks.md](ranks.md))",
    )
    prefill_tp: int = option(0, "ranks of each prefill worker; 0: as --tp", metavar="N")
    decode_tp: int = option(0, "ranks of each decode worker; 0: as --tp", metavar="N")
    transport: str = option(
        transports.AUTO,
        "transport of KV pages between workers; auto: the best one that both ends can open",
        choices=(transports.AUTO, *transports.TRANSPORTS.names),
        takes_path=True,
        detail=f". For GPUs: {_transports_for('cuda')}; for CPUs: {_transports_for('cpu')}",
    )
    num_pages: int = option(
        0,
        f"pages in each worker's pool; 0: {CPU.num_pages} on a CPU, as many as fit on a GPU",
        metavar="N",
        detail=" ([gpu.md](gpu.md#memory))",
    )
    chunk_size: int = option(
        0,
        f"maximum prompt tokens per forward pass; 0: {CPU.chunk_size} on a CPU, {GPU.chunk_size} on a GPU",
        metavar="N",
    )
    max_batch_size: int = option(
        0,
        f"maximum requests per decode step; 0: {CPU.max_batch_size} on a CPU, {GPU.max_batch_size} on a GPU",
        metavar="N",
    )
    mixed_steps: str = option(
        ON,
        "whether workers of role both prefill and decode in the same forward pass",
        choices=(ON, OFF),
    )
    disable_overlap_schedule: bool = option(
        False,
        "on a GPU, launch a forward pass only after the results of the previous one; for debugging",
    )
    store_memory: str = option(
        "",
        "host memory, on each node, for a page store beside the workers, which keeps pages that their pools evict: a "
        "size such as 64GiB",
        metavar="SIZE",
        shown="none: no page store",
    )
    store_disk: str = option(
        "",
        "directory and size, such as /data/pages:500GiB, in which the page store keeps pages too, also over restarts; "
        "they lie there unencrypted",
        metavar="DIR:SIZE",
        shown="none: memory only",
    )
    store_write_after: int = option(
        0, "hits in a worker's cache before a page is written to the page store; 0: every page", metavar="N"
    )
    store_namespace_share: float = option(
        1.0,
        "largest share of the page store's memory for the pages of one API key; without keys, of one cache namespace",
        metavar="SHARE",
        detail=" ([store.md](store.md#fair-shares))",
    )
    routing: str = option(
        AUTO,
        f"policy that chooses workers; auto: least_cost with --workers, else {default_of(RouterConfig, 'routing')}",
        choices=(AUTO, *ROUTING_POLICIES.names),
        takes_path=True,
    )
    num_routers: int = option(
        0,
        "router processes, each of which serves any client; 0: one on a CPU, on GPUs one per worker that decodes; or "
        "LOW:HIGH, on one host",
        name="routers",
        metavar="N",
        takes_bounds=True,
        detail=" ([requests.md](requests.md#routers))",
    )
    tls_cert: str = option(
        "", "PEM file with the server's certificate chain; turns TLS on for both ports", metavar="FILE"
    )
    tls_key: str = option("", "PEM file with the certificate's private key, without a passphrase", metavar="FILE")
    tls_client_ca: str = option(
        default_of(TlsConfig, "client_ca_file"),
        "PEM file of authorities; clients must show a certificate signed by one of them",
        metavar="FILE",
    )
    internal_tls: str = option(
        AUTO,
        "mutual TLS between the cluster's processes; auto: on with --internal-tls-cert, or if the cluster joins a Ray "
        "of several nodes",
        choices=SWITCH,
        detail=" ([operations.md](operations.md#tls-inside-the-cluster))",
    )
    internal_tls_ca: str = option(
        "",
        "PEM file of the authority that signed the processes' certificates, on every host",
        metavar="FILE",
        shown="generated for each cluster",
    )
    internal_tls_cert: str = option(
        "",
        f"PEM file with the processes' certificate, for the name {SERVER_NAME}, and its chain, on every host",
        metavar="FILE",
        shown="generated for each cluster",
    )
    internal_tls_key: str = option(
        "",
        "PEM file with that certificate's private key, without a passphrase, on every host",
        metavar="FILE",
        shown="generated for each cluster",
    )
    cluster_name: str = option(
        DEFAULT_NAME,
        "name by which commands find the cluster; unique on this host",
        name="name",
        metavar="NAME",
        detail=" ([operations.md](operations.md#clusters-by-name))",
    )
    drain_timeout_s: float = option(
        30.0,
        "how long running requests may take to finish after a stop request",
        name="drain-timeout",
        metavar="SECONDS",
    )
    ray_address: str = option(
        "",
        "address of a Ray running on this host, which the cluster joins and leaves running",
        metavar="ADDRESS",
        shown="none: the cluster starts its own Ray",
        detail=", such as `127.0.0.1:6379` ([below](#a-ray-that-is-there-already))",
    )
    placement_strategy: str = option(
        HOST,
        "nodes for the processes on the Ray of --ray-address; host: this host; pack: as few nodes as possible; spread: "
        "all nodes",
        choices=PLACEMENT_STRATEGIES,
        detail=" ([deploy.md](deploy.md#several-hosts))",
    )
    ray_autoscaler: str = option(
        AUTO,
        "over several nodes: whether workers without room wait for a node that Ray adds; auto: if this Ray says that "
        "it has an autoscaler",
        choices=SWITCH,
        detail=" ([deploy.md](deploy.md#rays-autoscaler))",
    )
    node_timeout_s: float = option(
        900.0,
        "over several nodes: how long workers wait for a node that Ray adds",
        name="node-timeout",
        metavar="SECONDS",
    )
    interface: str = option(
        "",
        "over several nodes: network interface on which the nodes reach each other, by name or as a network such as "
        "10.0.0.0/16",
        metavar="INTERFACE",
        shown="each node's address in Ray",
    )
    ship_code: bool = option(
        False,
        "over several nodes: let Ray copy this installation's code to them; otherwise each needs the same installation",
    )
    log_level: str = option(
        default_of(LogConfig, "level"),
        "log level of all processes; debug adds a line per batch",
        choices=LOG_LEVELS,
    )
    log_requests: bool = option(
        False,
        "print a line here when a request begins and when it ends, without prompts, outputs and keys",
    )
    log_dir: str = option(
        default_of(LogConfig, "directory"),
        "directory of the log files",
        metavar="DIRECTORY",
        shown="Ray's, /tmp/tandem-UID/ray/session_latest/logs",
    )


OPTIONS = options_of(ClusterOptions, GROUPS)
