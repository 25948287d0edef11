"""All that a person can configure of a cluster, each with what help and documentation say of it.

Nothing here imports torch: the command line reads this too.
"""

from dataclasses import MISSING, dataclass
from typing import NamedTuple

from tandem.config import DEVICES, LOG_LEVELS, SERVER_NAME, LogConfig, TlsConfig, default_of
from tandem.decode_worker.config import DecodeConfig
from tandem.deploy.config.node_choice import HOST, PLACEMENT_STRATEGIES
from tandem.deploy.config.options import option, options_of
from tandem.engine.attention import table as attention
from tandem.engine.config import DTYPES, KV_CACHE_DTYPES, LOAD_FORMATS, QUANTIZATIONS, EngineConfig
from tandem.engine.kvcache.eviction.table import EVICTION_POLICIES
from tandem.kvtransfer.transports import table as transports
from tandem.prefill_worker.config import PrefillConfig
from tandem.prefill_worker.policies.table import PREFILL_POLICIES
from tandem.router.config import GENERATION_CONFIGS, RouterConfig
from tandem.router.policies.table import ROUTING_POLICIES
from tandem.router.text.reasoning import REASONING_STYLES
from tandem.router.text.tool_parsers.table import TOOL_PARSERS
from tandem.router.workers.placement import PLACEMENTS

MODEL, WORKERS, SCHEDULING, PORTS, SECURITY, OPERATION = GROUPS = (
    "model",
    "workers",
    "memory and scheduling",
    "clients' ports",
    "security",
    "operation",
)


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
class ClusterOptions:
    """The fields of a ClusterConfig, which has the checks. A default that a process has too is stated there."""

    # --- model ---
    model: str = option(
        MISSING,
        MODEL,
        "directory, hub id such as org/name, .gguf file, or smollm2-135m-instruct",
        metavar="MODEL",
        detail="; the one option that is needed",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        MODEL,
        "a name that clients may call the model by, repeatable; the first stands in answers",
        metavar="NAME",
        shown="the model's own",
    )
    load_format: str = option(
        default_of(EngineConfig, "load_format"),
        MODEL,
        "auto: the model's weights; dummy: random ones, which need only its config and tokenizer",
        choices=LOAD_FORMATS,
    )
    dtype: str = option(
        "auto",
        MODEL,
        "number format of weights, and of KV pages unless --kv-cache-dtype says otherwise; auto: bfloat16 on a GPU, "
        "float32 on a CPU",
        choices=("auto", *DTYPES),
    )
    quantization: str = option(
        default_of(EngineConfig, "quantization"),
        MODEL,
        "auto: weights as the checkpoint has them; fp8: those that are not quantised become FP8 when they are loaded",
        choices=QUANTIZATIONS,
        detail=" ([quantization.md](quantization.md#weights))",
    )
    kv_cache_dtype: str = option(
        default_of(EngineConfig, "kv_cache_dtype"),
        MODEL,
        "number format of KV pages; auto: --dtype's; fp8_e4m3: 8 bits, with the checkpoint's scales where it has any",
        choices=tuple(KV_CACHE_DTYPES),
        detail=" ([quantization.md](quantization.md#kv-pages))",
    )
    max_model_len: int = option(
        default_of(EngineConfig, "max_model_len"),
        MODEL,
        "prompt and output tokens of a request together; 0: as many as model and --num-pages allow",
        metavar="N",
    )
    generation_config: str = option(
        default_of(RouterConfig, "generation_config"),
        MODEL,
        "defaults of sampling over OpenAI's API; auto: those of the model's generation_config.json; none: OpenAI's own",
        choices=GENERATION_CONFIGS,
        detail=" ([api.md](api.md#defaults-of-sampling))",
    )
    chat_template: str = option(
        default_of(RouterConfig, "chat_template"),
        MODEL,
        "file with a Jinja chat template",
        metavar="FILE",
        shown="the model's own",
    )
    tool_parser: str = option(
        default_of(RouterConfig, "tool_parser"),
        MODEL,
        "how calls of tools are read from outputs; auto: as fits the chat template",
        choices=("auto", "none", *TOOL_PARSERS.names),
        takes_path=True,
        detail=" ([api.md](api.md#tools))",
    )
    reasoning_parser: str = option(
        default_of(RouterConfig, "reasoning_parser"),
        MODEL,
        "how reasoning is told from answers; auto: as fits the chat template",
        choices=("auto", "none", *REASONING_STYLES),
        detail=" ([api.md](api.md#reasoning))",
    )
    # --- workers ---
    num_prefill: int = option(
        1, WORKERS, "prefill workers", name="prefill", metavar="N", shown="1, or 0 with --both or --workers"
    )
    num_decode: int = option(
        1, WORKERS, "decode workers", name="decode", metavar="N", shown="1, or 0 with --both or --workers"
    )
    num_both: int = option(0, WORKERS, "workers that prefill and decode", name="both", metavar="N")
    num_any: int = option(
        0,
        WORKERS,
        "workers that prefill and decode, with links to each other: the routers decide for each request which of them "
        "compute its prompt and which decode it; in place of the other three",
        name="workers",
        metavar="N",
        detail=" ([placement.md](placement.md))",
    )
    device: str = option(
        default_of(EngineConfig, "device"),
        WORKERS,
        "where the workers compute; cuda: on a GPU each",
        choices=DEVICES,
        detail=" ([gpu.md](gpu.md))",
    )
    num_threads: int = option(
        default_of(EngineConfig, "num_threads"),
        WORKERS,
        "CPU threads of each worker; 0: cores / workers",
        name="threads",
        metavar="N",
    )
    transport: str = option(
        transports.AUTO,
        WORKERS,
        "how KV pages travel between workers; auto: the best that both have and can open",
        choices=(transports.AUTO, *transports.TRANSPORTS.names),
        takes_path=True,
        detail=f". For GPUs: {_transports_for('cuda')}; for CPUs: {_transports_for('cpu')}",
    )
    attention_backend: str = option(
        default_of(EngineConfig, "attention_backend"),
        WORKERS,
        "attention kernels; auto: the first that has them for the device, the dtype and the model's heads",
        choices=(attention.AUTO, *attention.ATTENTION_BACKENDS.names),
        takes_path=True,
        detail=". FlashInfer's are for bfloat16 and heads of 64, 128 or 256; on Hopper and later `flashinfer` runs a "
        "kernel of our own for decode steps of up to 512 sequences "
        "([architecture.md](engine.md))",
    )
    cuda_graph_max_bs: int = option(
        default_of(EngineConfig, "cuda_graph_max_bs"),
        WORKERS,
        "largest decode batch that runs as a CUDA graph; 0: no forward does",
        metavar="N",
    )
    # --- memory and scheduling ---
    page_size: int = option(default_of(EngineConfig, "page_size"), SCHEDULING, "tokens in a page", metavar="N")
    num_pages: int = option(
        0,
        SCHEDULING,
        f"pages in each worker's pool; 0: {CPU.num_pages} on a CPU, as many as fit on a GPU",
        metavar="N",
        detail=" ([gpu.md](gpu.md#memory))",
    )
    mem_fraction_static: float = option(
        default_of(EngineConfig, "mem_fraction_static"),
        SCHEDULING,
        "share of a GPU's memory that weights, CUDA graphs and, without --num-pages, the pool may take together",
        metavar="SHARE",
    )
    chunk_size: int = option(
        0,
        SCHEDULING,
        f"prompt tokens in one prefill forward; 0: {CPU.chunk_size} on a CPU, {GPU.chunk_size} on a GPU",
        metavar="N",
    )
    max_batch_size: int = option(
        0,
        SCHEDULING,
        f"requests in one decode step; 0: {CPU.max_batch_size} on a CPU, {GPU.max_batch_size} on a GPU",
        metavar="N",
    )
    mixed_steps: str = option(
        ON,
        SCHEDULING,
        "whether workers of both roles compute prompts in one forward with decode steps",
        choices=(ON, OFF),
    )
    disable_overlap_schedule: bool = option(
        False,
        SCHEDULING,
        "launch a forward on a GPU only when the results of the one before are known; for debugging",
    )
    schedule: str = option(
        default_of(PrefillConfig, "schedule"),
        SCHEDULING,
        "which prompt is computed next",
        choices=PREFILL_POLICIES.names,
        takes_path=True,
    )
    eviction: str = option(
        default_of(EngineConfig, "eviction"),
        SCHEDULING,
        "which cached page goes first",
        choices=EVICTION_POLICIES.names,
        takes_path=True,
    )
    routing: str = option(
        AUTO,
        SCHEDULING,
        f"which workers serve a request; auto: least_cost with --workers, else {default_of(RouterConfig, 'routing')}",
        choices=(AUTO, *ROUTING_POLICIES.names),
        takes_path=True,
    )
    placement: str = option(
        default_of(RouterConfig, "placement"),
        SCHEDULING,
        "whether one worker may compute a prompt and decode it; auto: as --routing chooses; the others hold as long as "
        "there are such workers",
        choices=PLACEMENTS,
        detail=" ([placement.md](placement.md))",
    )
    ttft_objective_ms: float = option(
        default_of(RouterConfig, "ttft_objective_ms"),
        SCHEDULING,
        "time to the first token that least_cost aims at",
        name="ttft-objective",
        metavar="MS",
    )
    itl_objective_ms: float = option(
        default_of(RouterConfig, "itl_objective_ms"),
        SCHEDULING,
        "time between two tokens that least_cost aims at, and that prompts beside them leave in role both",
        name="itl-objective",
        metavar="MS",
    )
    # --- clients' ports ---
    num_routers: int = option(
        0,
        PORTS,
        "router processes, any of which serves any client; 0: one on a CPU, on GPUs one for each worker that decodes",
        name="routers",
        metavar="N",
        detail=" ([architecture.md](architecture.md#routers))",
    )
    host: str = option(
        default_of(RouterConfig, "host"),
        PORTS,
        "address of these ports; 0.0.0.0: reachable from other hosts",
        metavar="ADDRESS",
    )
    grpc_port: int = option(
        default_of(RouterConfig, "grpc_port"), PORTS, "port of the gRPC API; 0 picks a free one", metavar="PORT"
    )
    http_port: int = option(
        default_of(RouterConfig, "http_port"), PORTS, "port of the HTTP API; 0 picks a free one", metavar="PORT"
    )
    allowed_origins: tuple[str, ...] = option(
        default_of(RouterConfig, "allowed_origins"),
        PORTS,
        "an origin such as https://example.org whose pages in browsers may use the HTTP API, repeatable; *: every one",
        metavar="ORIGIN",
        shown="none",
    )
    root_path: str = option(
        default_of(RouterConfig, "root_path"),
        PORTS,
        "path such as /tandem under which a proxy shows the HTTP port, and which it leaves out of what it passes on",
        metavar="PATH",
    )
    max_body_bytes: int = option(
        default_of(RouterConfig, "max_body_bytes"), PORTS, "size of a request; a larger one is refused", metavar="N"
    )
    max_bytes_in_hand: int = option(
        default_of(RouterConfig, "max_bytes_in_hand"),
        PORTS,
        "size of all requests together until they have ended, half of it for each of several keys; further ones are "
        "refused",
        metavar="N",
    )
    max_connections: int = option(
        default_of(RouterConfig, "max_connections"),
        PORTS,
        "connections to each port; further ones are closed",
        metavar="N",
    )
    max_queued_requests: int = option(
        default_of(RouterConfig, "max_queued_requests"),
        PORTS,
        "requests that wait for their first token; further ones are refused",
        metavar="N",
    )
    request_timeout_s: float = option(
        default_of(RouterConfig, "request_timeout_s"),
        PORTS,
        "a request that takes longer fails",
        name="request-timeout",
        metavar="SECONDS",
    )
    worker_wait_timeout_s: float = option(
        default_of(RouterConfig, "worker_wait_timeout_s"),
        PORTS,
        "how long a request waits while no workers can serve it, because they are being started again; 0: it fails at "
        "once",
        name="worker-wait-timeout",
        metavar="SECONDS",
    )
    allow_cache_reset: bool = option(
        default_of(RouterConfig, "allow_cache_reset"),
        PORTS,
        "clients may have workers forget the prefixes that they have cached (POST /reset_prefix_cache); for "
        "measurements",
    )
    otlp_endpoint: str = option(
        default_of(RouterConfig, "otlp_endpoint"),
        PORTS,
        "URL of a collector such as http://localhost:4318/v1/traces that gets spans of requests over OTLP (HTTP); it "
        "needs tandem-llm[otlp]",
        metavar="URL",
        shown="as OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT say, else none",
        detail=" ([tracing.md](tracing.md#spans-of-requests))",
    )
    allow_tracing: bool = option(
        default_of(RouterConfig, "allow_tracing"),
        PORTS,
        "clients may record what the cluster does (tandem trace) although there are several API keys, each of which "
        "then sees the sizes and times of the others' requests, on the live page too",
    )
    # --- security ---
    api_keys: tuple[str, ...] = option(
        (),
        SECURITY,
        "a key that lets a client in, repeatable; others on this host can see it in the process list, unlike those of "
        "--api-key-file; 'KEY N': with N as the largest priority that it may ask for",
        secret=True,
        name="api-key",
        metavar="KEY",
        shown="none: everybody is let in",
    )
    max_requests_per_key: int = option(
        default_of(RouterConfig, "max_requests_per_key"),
        SECURITY,
        "requests in hand for each key, or for all clients together without keys; 0: any number",
        metavar="N",
    )
    share_cache_between_keys: bool = option(
        default_of(RouterConfig, "share_cache_between_keys"),
        SECURITY,
        "requests find in the caches what those of other keys computed; by the time taken, each key can then tell what "
        "others asked",
    )
    max_priority: int = option(
        default_of(RouterConfig, "max_priority"),
        SECURITY,
        "largest priority that a client may ask for, unless its key has a number of its own behind it",
        metavar="N",
        detail=" ([api.md](api.md#priority)); the default is the largest number that a request can hold",
    )
    tls_cert: str = option(
        "", SECURITY, "PEM file with the server's certificate chain: TLS on both ports", metavar="FILE"
    )
    tls_key: str = option(
        "", SECURITY, "PEM file with the certificate's private key, without a passphrase", metavar="FILE"
    )
    tls_client_ca: str = option(
        default_of(TlsConfig, "client_ca_file"),
        SECURITY,
        "PEM file of authorities; only clients with a certificate of theirs are let in",
        metavar="FILE",
    )
    internal_tls: str = option(
        AUTO,
        SECURITY,
        "whether the cluster's processes speak TLS with each other, each showing a certificate of the cluster's own; "
        "auto: if --internal-tls-cert is given, or the Ray that the cluster joins has several nodes",
        choices=SWITCH,
        detail=" ([operations.md](operations.md#tls-inside-the-cluster))",
    )
    internal_tls_ca: str = option(
        "",
        SECURITY,
        "PEM file of the authority by whose certificates the cluster's processes know each other, on every host",
        metavar="FILE",
        shown="one that is made for the cluster's life",
    )
    internal_tls_cert: str = option(
        "",
        SECURITY,
        f"PEM file with the certificate that they show, for the name {SERVER_NAME}, and its chain, on every host",
        metavar="FILE",
        shown="one that is made for the cluster's life",
    )
    internal_tls_key: str = option(
        "",
        SECURITY,
        "PEM file with that certificate's private key, without a passphrase, on every host",
        metavar="FILE",
        shown="one that is made for the cluster's life",
    )
    # --- operation ---
    cluster_name: str = option(
        DEFAULT_NAME,
        OPERATION,
        "what commands call the cluster by; no other that runs here has it",
        name="name",
        metavar="NAME",
        detail=" ([operations.md](operations.md#clusters-by-name))",
    )
    drain_timeout_s: float = option(
        30.0,
        OPERATION,
        "how long running requests may take to finish once the cluster is asked to stop",
        name="drain-timeout",
        metavar="SECONDS",
    )
    ray_address: str = option(
        "",
        OPERATION,
        "a Ray that runs on this host already, which the cluster joins, and leaves running",
        metavar="ADDRESS",
        shown="none: the cluster starts a Ray of its own",
        detail=", such as `127.0.0.1:6379` ([below](#a-ray-that-is-there-already))",
    )
    placement_strategy: str = option(
        HOST,
        OPERATION,
        "where the processes go on the Ray of --ray-address; host: all on this host; pack: on as few nodes as may be; "
        "spread: over all",
        choices=PLACEMENT_STRATEGIES,
        detail=" ([deploy.md](deploy.md#several-hosts))",
    )
    interface: str = option(
        "",
        OPERATION,
        "over several nodes: the network interface, by its name or as a network such as 10.0.0.0/16, at which each "
        "node is reached by the others",
        metavar="INTERFACE",
        shown="the address that Ray knows a node by",
    )
    ship_code: bool = option(
        False,
        OPERATION,
        "over several nodes: Ray brings them this installation's code; otherwise each has the same installed",
    )
    log_level: str = option(
        default_of(LogConfig, "level"),
        OPERATION,
        "how much each process writes about itself; debug adds a line for every batch",
        choices=LOG_LEVELS,
    )
    log_requests: bool = option(
        False,
        OPERATION,
        "show a line in this terminal when a request begins and one when it ends, without prompts, outputs and keys",
    )
    log_dir: str = option(
        default_of(LogConfig, "directory"),
        OPERATION,
        "directory of the log files",
        metavar="DIRECTORY",
        shown="Ray's, /tmp/tandem-UID/ray/session_latest/logs",
    )


OPTIONS = options_of(ClusterOptions)
