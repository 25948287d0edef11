"""What a router can be told."""

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.config import (
    ClusterTls,
    ClusterTlsFiles,
    LogConfig,
    Role,
    TlsConfig,
    parse_api_key,
    require,
    require_one_of,
    require_positive,
)
from tandem.options import option
from tandem.router.policies.table import ROUTING_POLICIES
from tandem.router.text.reasoning import REASONING_STYLES
from tandem.router.text.tool_parsers.table import TOOL_PARSERS
from tandem.router.workers.placement import AUTO, PLACEMENTS

GENERATION_CONFIGS = (AUTO, "none")
# Pages of browsers' extensions and of programs made of pages have schemes of their own.
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://([A-Za-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")


_OTLP_ENDPOINT = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")


class RouterAddresses(NamedTuple):
    """Where a router listens, each "host:port": for clients over gRPC and over HTTP, and for the cluster's own
    processes."""

    grpc: str
    http: str
    cluster: str


def has_otlp() -> bool:
    """Whether the extra is installed. Finding out imports none of it."""
    try:
        names = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
        return all(importlib.util.find_spec(name) is not None for name in names)
    except ModuleNotFoundError:
        return False


def is_endpoint(url: str) -> bool:
    """Whether spans can be posted there."""
    return _OTLP_ENDPOINT.fullmatch(url) is not None


def port_of(address: str) -> int:
    """Args: address: "host:port"."""
    return int(address.rpartition(":")[2])


def host_of(address: str) -> str:
    """Args: address: "host:port"."""
    return address.rpartition(":")[0]


@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """Options of a cluster that every router takes as they are."""

    generation_config: str = option(
        AUTO,
        "defaults of sampling over OpenAI's API; auto: those of the model's generation_config.json; none: OpenAI's own",
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
        "how calls of tools are read from outputs; auto: as fits the chat template",
        choices=("auto", "none", *TOOL_PARSERS.names),
        takes_path=True,
        detail=" ([api.md](api.md#tools))",
    )
    reasoning_parser: str = option(
        "auto",
        "how reasoning is told from answers; auto: as fits the chat template",
        choices=("auto", "none", *REASONING_STYLES),
        detail=" ([api.md](api.md#reasoning))",
    )
    placement: str = option(
        AUTO,
        "whether one worker may compute a prompt and decode it; auto: as --routing chooses; the others hold as long as "
        "there are such workers",
        choices=PLACEMENTS,
        detail=" ([placement.md](placement.md))",
    )
    ttft_objective_ms: float = option(
        500.0,
        "time to the first token that least_cost aims at",
        name="ttft-objective",
        metavar="MS",
    )
    itl_objective_ms: float = option(
        25.0,
        "time between two tokens that least_cost aims at, and that prompts beside them leave in role both",
        name="itl-objective",
        metavar="MS",
    )
    host: str = option(
        "127.0.0.1",
        "address of these ports; 0.0.0.0: reachable from other hosts",
        metavar="ADDRESS",
    )
    grpc_port: int = option(50051, "port of the gRPC API; 0 picks a free one", metavar="PORT")
    http_port: int = option(8000, "port of the HTTP API; 0 picks a free one", metavar="PORT")
    allowed_origins: tuple[str, ...] = option(
        (),
        "an origin such as https://example.org whose pages in browsers may use the HTTP API, repeatable; *: every one",
        metavar="ORIGIN",
        shown="none",
    )
    root_path: str = option(
        "",
        "path such as /tandem under which a proxy shows the HTTP port, and which it leaves out of what it passes on",
        metavar="PATH",
    )
    max_body_bytes: int = option(8 * 2**20, "size of a request; a larger one is refused", metavar="N")
    max_bytes_in_hand: int = option(
        2**30,
        "size of all requests together until they have ended, half of it for each of several keys; further ones are "
        "refused",
        metavar="N",
    )
    max_connections: int = option(
        4096,
        "connections to each port; further ones are closed",
        metavar="N",
    )
    max_queued_requests: int = option(
        1024,
        "requests that wait for their first token; further ones are refused",
        metavar="N",
    )
    request_timeout_s: float = option(
        3600.0,
        "a request that takes longer fails",
        name="request-timeout",
        metavar="SECONDS",
    )
    worker_wait_timeout_s: float = option(
        60.0,
        "how long a request waits while no workers can serve it, because they are being started again; 0: it fails at "
        "once",
        name="worker-wait-timeout",
        metavar="SECONDS",
    )
    allow_cache_reset: bool = option(
        False,
        "clients may have workers forget the prefixes that they have cached (POST /reset_prefix_cache); for "
        "measurements",
    )
    otlp_endpoint: str = option(
        "",
        "URL of a collector such as http://localhost:4318/v1/traces that gets spans of requests over OTLP (HTTP); it "
        "needs tandem-llm[otlp]",
        metavar="URL",
        shown="as OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT say, else none",
        detail=" ([tracing.md](tracing.md#spans-of-requests))",
    )
    allow_tracing: bool = option(
        False,
        "clients may record what the cluster does (tandem trace) although there are several API keys, each of which "
        "then sees the sizes and times of the others' requests, on the live page too",
    )
    api_keys: tuple[str, ...] = option(
        (),
        "a key that lets a client in, repeatable; others on this host can see it in the process list, unlike those of "
        "--api-key-file; 'KEY N': with N as the largest priority that it may ask for",
        secret=True,
        name="api-key",
        metavar="KEY",
        shown="none: everybody is let in",
    )
    max_requests_per_key: int = option(
        0,
        "requests in hand for each key, or for all clients together without keys; 0: any number",
        metavar="N",
    )
    share_cache_between_keys: bool = option(
        False,
        "requests find in the caches what those of other keys computed; by the time taken, each key can then tell what "
        "others asked",
    )
    max_priority: int = option(
        2**31 - 1,
        "largest priority that a client may ask for, unless its key has a number of its own behind it",
        metavar="N",
        detail=" ([api.md](api.md#priority)); the default is the largest number that a request can hold",
    )


@dataclass(frozen=True, slots=True)
class RouterConfig(RouterOptions):
    """One router process.

    Attributes:
        router_id: its name in the cluster; a router that is started again keeps it.
        model_dir: where tokenizer, chat template and limits are read from.
        model_name: what clients call the model, and answers.
        other_model_names: what clients may call it as well.
        generation_config: AUTO: what OpenAI's API leaves to the server is as the model's generation_config.json says;
            "none": as OpenAI does.
        host: the address of the clients' ports.
        grpc_port, http_port: its own two ports for clients; 0 picks a free one.
        routers: all routers of the cluster by their names, this one among them; empty: it is alone.
        workers: the workers that the cluster is to have, their roles by their names; empty: it is not known.
        num_restarts: how often this router has been started again.
        shared_grpc_port, shared_http_port: ports for clients at which all routers listen; 0: there are none.
        reuse_ports: all its ports are held by whoever started it, who lets it in.
        api_keys: what clients show, each as "KEY" or "KEY MAX_PRIORITY"; empty lets everybody in.
        max_requests_per_key: requests in hand for each key at most, for all clients together without keys; 0: any
            number.
        share_cache_between_keys: whether a request may find in a cache what one of another key left there.
        allow_cache_reset: whether clients may have workers forget what they have cached.
        otlp_endpoint: URL that requests' spans are posted to, over OTLP; "": there are none.
        allow_tracing: whether clients may record what the cluster does although there are several keys, and see all
            requests on the live page.
        max_priority: that a client may ask for, unless its key says otherwise.
        max_body_bytes: of a request, over either port.
        max_bytes_in_hand: of all requests together, from when they are read until they have ended; where there are
            several keys, one may have half of it.
        max_connections: of each of the clients' ports.
        allowed_origins: of which pages in browsers may read answers over HTTP, each "https://host" or "*".
        root_path: under which a proxy shows the HTTP port, and which it leaves out of what it passes on, or "".
        tls: on the clients' ports; None: plain.
        cluster_token: what the processes of this cluster know each other by.
        cluster_tls: between them; None: plain.
        cluster_port: the workers' port; 0 picks a free one.
        cluster_host: the address of that port, for workers alone.
        heartbeat_timeout_s: silence after which a worker counts as lost.
        stall_timeout_s: time without a scheduler step after which a worker counts as lost though it talks.
        routing: who serves a request: a name of router/policies/table.py, or the import path of a RoutingPolicy,
            "package.module:Class".
        placement: whether one worker may compute a request's prompt and decode it (router/workers/placement.py);
        either way it
            is served the other way where there are no such workers.
        ttft_objective_ms, itl_objective_ms: how soon a first token is to come, and the next ones; by these a policy may
            choose.
        max_queued_requests: requests that wait for their first token at most; further ones are refused at once.
        request_timeout_s: a request that takes longer fails.
        decode_word_timeout_s: how long the router waits for the decode worker's word on a request whose prefill
            worker died after the first token.
        worker_wait_timeout_s: how long a request waits while no workers can serve it; 0: it fails at once.
        max_waiting_bytes: what requests that wait for workers may hold; new ones beyond it are refused.
        max_attempts: failed attempts after which a request fails for good.
        admit_duration_s: how long a decode worker remembers a request that has no lease yet.
        log: what it writes about
        itself.
        request_lines_socket: takes a line for each request's begin and end (router/observe/request_lines.py); "": none.
        keeps_request_lines: whether these lines wait at the router for whoever supervises it to ask, instead.
        chat_template: a file with a chat template to be used instead of the model's own; empty: there is none.
        tool_parser: what finds calls of tools in outputs: a name of router/text/tool_parsers/table.py, or the import
            path of a ToolParser; "auto": what fits the chat template; "none": nothing.
        reasoning_parser: how the model reasons before it answers: a name of REASONING_STYLES; "auto": as the chat
            template tells; "none": its outputs are answers.
    """

    model_dir: str
    model_name: str
    max_model_len: int
    other_model_names: tuple[str, ...] = ()
    router_id: str = "router-0"
    routers: Mapping[str, RouterAddresses] = field(default_factory=dict)
    workers: Mapping[str, Role] = field(default_factory=dict)
    num_restarts: int = 0
    shared_grpc_port: int = 0
    shared_http_port: int = 0
    reuse_ports: bool = False
    tls: TlsConfig | None = None
    cluster_token: str = field(default="", repr=False)
    cluster_tls: ClusterTls | ClusterTlsFiles | None = None
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
        keys = [parse_api_key(text).key for text in self.api_keys]
        require(len(keys) == len(set(keys)), "an API key is there twice, with different priorities")
        require(self.max_requests_per_key >= 0, "max_requests_per_key must not be negative")
        require(self.worker_wait_timeout_s >= 0, "worker_wait_timeout_s must not be negative")
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
        """All that clients may call the model by, the first one first."""
        return self.model_name, *self.other_model_names
