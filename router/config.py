"""Configuration of a router."""

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.adapters import AdapterEntry
from tandem.config import (
    ClusterTls,
    ClusterTlsFiles,
    LogConfig,
    Role,
    TlsConfig,
    parse_api_key,
    require,
    require_api_key,
    require_one_of,
    require_positive,
)
from tandem.key_file import KeyFile, check_keys
from tandem.options import option
from tandem.router.policies.table import ROUTING_POLICIES
from tandem.router.text.reasoning import REASONING_STYLES
from tandem.router.text.tool_parsers.table import TOOL_PARSERS
from tandem.router.workers.placement import AUTO, PLACEMENTS

# Value of worker_wait_timeout_s.
DERIVED = -1.0
GENERATION_CONFIGS = (AUTO, "none")
# Browser extensions and desktop apps have schemes of their own.
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://([A-Za-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")


_OTLP_ENDPOINT = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")


class RouterAddresses(NamedTuple):
    """Each "host:port"."""

    grpc: str
    http: str
    cluster: str


def has_otlp() -> bool:
    """Returns whether the extra `otlp` is installed, without importing it."""
    try:
        names = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
        return all(importlib.util.find_spec(name) is not None for name in names)
    except ModuleNotFoundError:
        return False


def is_endpoint(url: str) -> bool:
    return _OTLP_ENDPOINT.fullmatch(url) is not None


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def host_of(address: str) -> str:
    return address.rpartition(":")[0]


@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """Options of `tandem serve` for all routers."""

    generation_config: str = option(
        AUTO,
        "sampling defaults of the OpenAI API; auto: from the model's generation_config.json; none: OpenAI's own",
        choices=GENERATION_CONFIGS,
        detail=" ([api.md](api.md#defaults-of-sampling))",
    )
    chat_template: str = option(
        "",
        "file with a Jinja chat template",
        metavar="FILE",
        shown="the model's own",
    )
    tool_parser: str = option(
        "auto",
        "parser of tool calls in outputs; auto: the one for the chat template",
        choices=("auto", "none", *TOOL_PARSERS.names),
        takes_path=True,
        detail=" ([api.md](api.md#tools))",
    )
    reasoning_parser: str = option(
        "auto",
        "parser that separates reasoning from answers; auto: the one for the chat template",
        choices=("auto", "none", *REASONING_STYLES),
        detail=" ([api.md](api.md#reasoning))",
    )
    open_objects: bool = option(
        False,
        "let objects of JSON schemas have other properties than theirs unless additionalProperties is false, as JSON "
        "Schema has it; without this flag only where additionalProperties says so",
        detail=" ([api.md](api.md#structured-output))",
    )
    placement: str = option(
        AUTO,
        "whether one worker may compute a prompt and decode it; auto: --routing decides; other values apply while such "
        "workers exist",
        choices=PLACEMENTS,
        detail=" ([placement.md](placement.md))",
    )
    ttft_objective_ms: float = option(
        500.0,
        "TTFT that least_cost aims at",
        name="ttft-objective",
        metavar="MS",
    )
    itl_objective_ms: float = option(
        25.0,
        "ITL that least_cost aims at, and that workers of role both keep to beside prompts",
        name="itl-objective",
        metavar="MS",
    )
    host: str = option(
        "127.0.0.1",
        "address of the client ports; 0.0.0.0: reachable from other hosts",
        metavar="ADDRESS",
    )
    grpc_port: int = option(50051, "port of the gRPC API; 0: any free port", metavar="PORT")
    http_port: int = option(8000, "port of the HTTP API; 0: any free port", metavar="PORT")
    allowed_origins: tuple[str, ...] = option(
        (),
        "origin such as https://example.org whose web pages may use the HTTP API, repeatable; *: any origin",
        metavar="ORIGIN",
        shown="none",
    )
    root_path: str = option(
        "",
        "path prefix such as /tandem that a proxy in front of the HTTP port strips from requests",
        metavar="PATH",
    )
    max_body_bytes: int = option(8 * 2**20, "maximum size of a request; larger ones are refused", metavar="N")
    max_bytes_in_hand: int = option(
        2**30,
        "maximum size of all requests in flight together, and half of it per key if there are several keys; further "
        "requests are refused",
        metavar="N",
    )
    max_connections: int = option(
        4096,
        "maximum connections per port; further ones are closed",
        metavar="N",
    )
    max_queued_requests: int = option(
        1024,
        "maximum requests waiting for their first token; further ones are refused",
        metavar="N",
    )
    request_timeout_s: float = option(
        3600.0,
        "time after which a request fails",
        name="request-timeout",
        metavar="SECONDS",
    )
    worker_wait_timeout_s: float = option(
        DERIVED,
        "how long a request waits while no worker can serve it, as during a restart; 0: it fails at once; -1: longer "
        "than it takes to notice that a worker hangs and to start another",
        name="worker-wait-timeout",
        metavar="SECONDS",
        detail=" ([requests.md](requests.md#waiting-for-workers))",
    )
    allow_cache_reset: bool = option(
        False,
        "let clients clear the workers' cached prefixes (POST /reset_prefix_cache); for measurements",
    )
    otlp_endpoint: str = option(
        "",
        "URL of a collector, such as http://localhost:4318/v1/traces, for spans of requests over OTLP/HTTP; needs "
        "tandem-llm[otlp]",
        metavar="URL",
        shown="from OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT, else none",
        detail=" ([tracing.md](tracing.md#spans-of-requests))",
    )
    allow_tracing: bool = option(
        False,
        "let clients record traces (tandem trace) although there are several API keys; each key then sees sizes and "
        "times of all requests, also on the live page",
    )
    api_keys: tuple[str, ...] = option(
        (),
        "key for clients, repeatable; other users of this host can see it in the process list, unlike the keys of "
        "--api-key-file; 'KEY N' limits its priority to N",
        secret=True,
        name="api-key",
        metavar="KEY",
        shown="none: open to everybody",
    )
    admin_keys: tuple[str, ...] = option(
        (),
        "key for loading and unloading adapters while the cluster serves, repeatable; no key for anything else, and "
        "none of --api-key. Without one, adapters are those of --lora",
        secret=True,
        name="admin-key",
        metavar="KEY",
        shown="none",
        detail=" ([adapters.md](adapters.md#loading-and-unloading)). $TANDEM_ADMIN_KEY, if set, is one more",
    )
    max_requests_per_key: int = option(
        0,
        "maximum requests in flight per key, or of all clients together without keys; 0: no limit",
        metavar="N",
    )
    share_cache_between_keys: bool = option(
        False,
        "let requests reuse prefixes cached for other keys; response times then reveal to each key what others asked",
    )
    max_priority: int = option(
        2**31 - 1,
        "highest priority that a client may request, unless its key has its own limit",
        metavar="N",
        detail=" ([api.md](api.md#priority)); the default is the largest value of the field",
    )


@dataclass(frozen=True, slots=True)
class RouterConfig(RouterOptions):
    """
    Attributes:
        other_model_names: further names for clients; answers have model_name.
        max_model_len: maximum prompt and output tokens of a request together.
        router_id: name in the cluster, kept over restarts.
        routers: addresses of all routers by name, this one included; empty: this router is alone.
        workers: roles of all planned workers by name; empty, if not starts_from_zero: unknown.
        stores: names of all page stores.
        adapters: names of adapters from the command line, with their content.
        takes_adapters: adapters may be loaded while the cluster serves.
        shares_drafts: workers learn the owners of cache namespaces whose requests may draft from each other.
        starts_from_zero: the cluster may have no worker until a request waits for one.
        shared_grpc_port, shared_http_port: ports on which all routers listen; 0: none.
        reuse_ports: the launcher holds all ports open with SO_REUSEPORT.
        key_file: file with some of the api_keys, read again when it changes; None: there is none.
        tls: TLS of the client ports, whose files are read again when they change; None: plain.
        cluster_token: secret shared by the cluster's processes.
        cluster_tls: certificates between them; None: plain.
        namespace_secret: secret of cache namespaces, equal for all routers and lives of the cluster whose pages outlive
            it; at most 64 bytes; "": the cluster_token, which each cluster has of its own.
        cluster_host, cluster_port: address for workers; port 0: any free port.
        heartbeat_timeout_s: silence after which a worker counts as lost.
        stall_timeout_s: time without a scheduler step after which a worker counts as lost.
        routing: name in router/policies/table.py, or import path "package.module:Class".
        decode_word_timeout_s: limit for the decode worker's report on a request that lost its prefill worker.
        max_waiting_bytes: maximum size of all requests that wait for workers.
        admit_duration_s: time for which a decode worker remembers a request without a lease.
        request_lines_socket: receiver of request lines; "": none.
        keeps_request_lines: request lines wait in the router for the supervisor.
    """

    model_dir: str
    model_name: str
    max_model_len: int
    other_model_names: tuple[str, ...] = ()
    router_id: str = "router-0"
    routers: Mapping[str, RouterAddresses] = field(default_factory=dict)
    workers: Mapping[str, Role] = field(default_factory=dict)
    stores: tuple[str, ...] = ()
    adapters: tuple[AdapterEntry, ...] = ()
    takes_adapters: bool = False
    shares_drafts: bool = False
    starts_from_zero: bool = False
    num_restarts: int = 0
    shared_grpc_port: int = 0
    shared_http_port: int = 0
    reuse_ports: bool = False
    key_file: KeyFile | None = None
    tls: TlsConfig | None = None
    cluster_token: str = field(default="", repr=False)
    cluster_tls: ClusterTls | ClusterTlsFiles | None = None
    namespace_secret: str = field(default="", repr=False)
    cluster_port: int = 0
    cluster_host: str = "127.0.0.1"
    heartbeat_timeout_s: float = 3.0
    stall_timeout_s: float = 60.0
    routing: str = "least_loaded"
    decode_word_timeout_s: float = 2.0
    max_waiting_bytes: int = 256 * 2**20
    max_attempts: int = 8
    admit_duration_s: float = 600.0
    log: LogConfig = field(default_factory=LogConfig)
    request_lines_socket: str = ""
    keeps_request_lines: bool = False

    def __post_init__(self) -> None:
        for name in ("grpc_port", "http_port", "shared_grpc_port", "shared_http_port", "cluster_port"):
            port = getattr(self, name)
            require(0 <= port < 65536, f"{name} must be between 0 and 65535, not {port}")
        num_bytes = len(self.namespace_secret.encode())
        require(num_bytes <= 64, f"namespace_secret must have at most 64 bytes, not {num_bytes}")
        ROUTING_POLICIES.check("routing", self.routing)
        require_one_of(self, "placement", PLACEMENTS)
        require_one_of(self, "generation_config", GENERATION_CONFIGS)
        for origin in self.allowed_origins:
            require(
                _ORIGIN.fullmatch(origin) is not None,
                f"allowed_origins must be * or like https://example.org or http://localhost:3000, without a path, not "
                f"{origin!r}",
            )
        require(
            _ROOT_PATH.fullmatch(self.root_path) is not None,
            f"root_path must begin with a slash and not end with one, like /tandem, not {self.root_path!r}",
        )
        if self.otlp_endpoint:
            require(
                is_endpoint(self.otlp_endpoint),
                f"otlp_endpoint must be a URL like http://localhost:4318/v1/traces, not {self.otlp_endpoint!r}",
            )
            require(
                has_otlp(),
                "otlp_endpoint needs packages that are not installed: pip install 'tandem-llm[otlp]'",
            )
        TOOL_PARSERS.check("tool_parser", self.tool_parser, besides=("auto", "none"))
        require_one_of(self, "reasoning_parser", ("auto", "none", *REASONING_STYLES))
        check_keys(self.api_keys)
        for key in self.admin_keys:
            require_api_key(key)
        shared = set(self.admin_keys) & {parse_api_key(text).key for text in self.api_keys}
        require(not shared, "admin_keys and api_keys must not share a key")
        require(
            self.max_requests_per_key >= 0,
            f"max_requests_per_key must not be negative, but is {self.max_requests_per_key}",
        )
        require(
            self.worker_wait_timeout_s >= 0 or self.worker_wait_timeout_s == DERIVED,
            f"worker_wait_timeout_s must not be negative, except -1, but is {self.worker_wait_timeout_s:g}",
        )
        require_positive(
            self,
            "max_model_len",
            "ttft_objective_ms",
            "itl_objective_ms",
            "heartbeat_timeout_s",
            "stall_timeout_s",
            "max_attempts",
            "admit_duration_s",
            "max_queued_requests",
            "max_waiting_bytes",
            "request_timeout_s",
            "max_body_bytes",
            "max_connections",
        )
        require(
            self.max_bytes_in_hand >= 2 * self.max_body_bytes,
            f"max_bytes_in_hand must be at least twice max_body_bytes, {2 * self.max_body_bytes}, not "
            f"{self.max_bytes_in_hand}",
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.model_name, *self.other_model_names
