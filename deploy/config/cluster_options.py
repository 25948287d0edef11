"""The options of `tandem serve`, with their text for help and documentation.

Nothing here imports torch: the command line reads this too.
"""

from dataclasses import MISSING, dataclass
from typing import NamedTuple

from tandem.config import LOG_LEVELS, SERVER_NAME, LogConfig, TlsConfig, default_of
from tandem.decode_worker.config import DecodeConfig
from tandem.deploy.config.node_choice import HOST, PLACEMENT_STRATEGIES
from tandem.deploy.config.options import options_of
from tandem.engine.config import DTYPES, EngineConfig, EngineOptions
from tandem.kvtransfer.transports import table as transports
from tandem.options import option
from tandem.prefill_worker.config import PrefillConfig, PrefillOptions
from tandem.router.config import RouterConfig, RouterOptions
from tandem.router.policies.table import ROUTING_POLICIES

SECURITY = "security"
# Order of the options in help and documentation, by group.
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
    ),
    "workers": (
        "num_prefill",
        "num_decode",
        "num_both",
        "num_any",
        "device",
        "num_threads",
        "transport",
        "attention_backend",
        "cuda_graph_max_bs",
    ),
    "memory and scheduling": (
        "page_size",
        "num_pages",
        "mem_fraction_static",
        "chunk_size",
        "max_batch_size",
        "mixed_steps",
        "disable_overlap_schedule",
        "schedule",
        "eviction",
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
        "interface",
        "ship_code",
        "log_level",
        "log_requests",
        "log_dir",
    ),
}


class DeviceDefaults(NamedTuple):
    """How a worker on one kind of device is configured where the person who starts the cluster does not say.

    Attributes:
        num_pages: 0 means as many as fit.
    """

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
    # A GPU computes thousands of prompt tokens in the time of a few hundred; prompts that long fill its matrix units.
    "cuda": DeviceDefaults("bfloat16", num_pages=0, chunk_size=8192, max_batch_size=256),
}
# The name of a cluster to which nobody gave one.
DEFAULT_NAME = "tandem"
CPU, GPU = DEVICE_DEFAULTS["cpu"], DEVICE_DEFAULTS["cuda"]
SWITCH = AUTO, ON, OFF = ("auto", "on", "off")


def _transports_for(device: str) -> str:
    return ", ".join(f"`{name}`" for name in transports.TRANSPORTS.for_device(device))


@dataclass(frozen=True, slots=True)
class ClusterOptions(PrefillOptions, EngineOptions, RouterOptions):
    """All options of a cluster; ClusterConfig checks them.

    A process's package declares the options that the process takes as they are. Those here concern the whole cluster,
    or have a value that depends on the device, the role or the number of workers.
    """

    model: str = option(
        MISSING,
        "directory, hub id such as org/name, .gguf file, or smollm2-135m-instruct",
        metavar="MODEL",
        detail="; the one option that is needed",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "a name that clients may call the model by, repeatable; the first stands in answers",
        metavar="NAME",
        shown="the model's own",
    )
    dtype: str = option(
        "auto",
        "number format of weights, and of KV pages unless --kv-cache-dtype says otherwise; auto: bfloat16 on a GPU, "
        "float32 on a CPU",
        choices=("auto", *DTYPES),
    )
    num_prefill: int = option(
        1, "prefill workers", name="prefill", metavar="N", shown="1, or 0 with --both or --workers"
    )
    num_decode: int = option(1, "decode workers", name="decode", metavar="N", shown="1, or 0 with --both or --workers")
    num_both: int = option(0, "workers that prefill and decode", name="both", metavar="N")
    num_any: int = option(
        0,
        "workers that prefill and decode, with links to each other: the routers decide for each request which of them "
        "compute its prompt and which decode it; in place of the other three",
        name="workers",
        metavar="N",
        detail=" ([placement.md](placement.md))",
    )
    transport: str = option(
        transports.AUTO,
        "how KV pages travel between workers; auto: the best that both have and can open",
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
        f"prompt tokens in one prefill forward; 0: {CPU.chunk_size} on a CPU, {GPU.chunk_size} on a GPU",
        metavar="N",
    )
    max_batch_size: int = option(
        0,
        f"requests in one decode step; 0: {CPU.max_batch_size} on a CPU, {GPU.max_batch_size} on a GPU",
        metavar="N",
    )
    mixed_steps: str = option(
        ON,
        "whether workers of both roles compute prompts in one forward with decode steps",
        choices=(ON, OFF),
    )
    disable_overlap_schedule: bool = option(
        False,
        "launch a forward on a GPU only when the results of the one before are known; for debugging",
    )
    routing: str = option(
        AUTO,
        f"which workers serve a request; auto: least_cost with --workers, else {default_of(RouterConfig, 'routing')}",
        choices=(AUTO, *ROUTING_POLICIES.names),
        takes_path=True,
    )
    num_routers: int = option(
        0,
        "router processes, any of which serves any client; 0: one on a CPU, on GPUs one for each worker that decodes",
        name="routers",
        metavar="N",
        detail=" ([architecture.md](architecture.md#routers))",
    )
    tls_cert: str = option("", "PEM file with the server's certificate chain: TLS on both ports", metavar="FILE")
    tls_key: str = option("", "PEM file with the certificate's private key, without a passphrase", metavar="FILE")
    tls_client_ca: str = option(
        default_of(TlsConfig, "client_ca_file"),
        "PEM file of authorities; only clients with a certificate of theirs are let in",
        metavar="FILE",
    )
    internal_tls: str = option(
        AUTO,
        "whether the cluster's processes speak TLS with each other, each showing a certificate of the cluster's own; "
        "auto: if --internal-tls-cert is given, or the Ray that the cluster joins has several nodes",
        choices=SWITCH,
        detail=" ([operations.md](operations.md#tls-inside-the-cluster))",
    )
    internal_tls_ca: str = option(
        "",
        "PEM file of the authority by whose certificates the cluster's processes know each other, on every host",
        metavar="FILE",
        shown="one that is made for the cluster's life",
    )
    internal_tls_cert: str = option(
        "",
        f"PEM file with the certificate that they show, for the name {SERVER_NAME}, and its chain, on every host",
        metavar="FILE",
        shown="one that is made for the cluster's life",
    )
    internal_tls_key: str = option(
        "",
        "PEM file with that certificate's private key, without a passphrase, on every host",
        metavar="FILE",
        shown="one that is made for the cluster's life",
    )
    cluster_name: str = option(
        DEFAULT_NAME,
        "what commands call the cluster by; no other that runs here has it",
        name="name",
        metavar="NAME",
        detail=" ([operations.md](operations.md#clusters-by-name))",
    )
    drain_timeout_s: float = option(
        30.0,
        "how long running requests may take to finish once the cluster is asked to stop",
        name="drain-timeout",
        metavar="SECONDS",
    )
    ray_address: str = option(
        "",
        "a Ray that runs on this host already, which the cluster joins, and leaves running",
        metavar="ADDRESS",
        shown="none: the cluster starts a Ray of its own",
        detail=", such as `127.0.0.1:6379` ([below](#a-ray-that-is-there-already))",
    )
    placement_strategy: str = option(
        HOST,
        "where the processes go on the Ray of --ray-address; host: all on this host; pack: on as few nodes as may be; "
        "spread: over all",
        choices=PLACEMENT_STRATEGIES,
        detail=" ([deploy.md](deploy.md#several-hosts))",
    )
    interface: str = option(
        "",
        "over several nodes: the network interface, by its name or as a network such as 10.0.0.0/16, at which each "
        "node is reached by the others",
        metavar="INTERFACE",
        shown="the address that Ray knows a node by",
    )
    ship_code: bool = option(
        False,
        "over several nodes: Ray brings them this installation's code; otherwise each has the same installed",
    )
    log_level: str = option(
        default_of(LogConfig, "level"),
        "how much each process writes about itself; debug adds a line for every batch",
        choices=LOG_LEVELS,
    )
    log_requests: bool = option(
        False,
        "show a line in this terminal when a request begins and one when it ends, without prompts, outputs and keys",
    )
    log_dir: str = option(
        default_of(LogConfig, "directory"),
        "directory of the log files",
        metavar="DIRECTORY",
        shown="Ray's, /tmp/tandem-UID/ray/session_latest/logs",
    )


OPTIONS = options_of(ClusterOptions, GROUPS)
