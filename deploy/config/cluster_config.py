"""Configuration of a cluster and its processes. Imports no torch: the command line reads this too."""

import re
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from tandem.adapters import check_adapter_name
from tandem.config import (
    DEVICES,
    ROLES,
    WORKER_KINDS,
    LogConfig,
    Role,
    TlsConfig,
    WorkerKind,
    default_of,
    require,
    require_one_of,
)
from tandem.decode_worker.config import DecodeConfig, DecodeOptions
from tandem.decode_worker.draft_policy import MAX_DRAFTS
from tandem.decode_worker.speculation import AUTO_SPECULATION, NO_SPECULATION, parse_speculation
from tandem.deploy.config.bounds import COUNT_FIELDS, Bounds, SizedKind, has_zero, in_fields
from tandem.deploy.config.cluster_options import DEVICE_DEFAULTS, OFF, ON, SWITCH, ClusterOptions, DeviceDefaults
from tandem.deploy.config.node_choice import HOST
from tandem.deploy.config.store_options import parse_disk, parse_size
from tandem.engine.config import DTYPES, EngineConfig, EngineOptions
from tandem.engine.ranks.config import MAX_BATCH_SIZE, MAX_DEGREE
from tandem.hosts import check_network
from tandem.key_file import KeyFile
from tandem.kvtransfer.config import LinkConfig
from tandem.kvtransfer.transports import table as transports
from tandem.pagestore.config import StoreConfig, StoreDisk
from tandem.prefill_worker.config import PrefillConfig, PrefillOptions
from tandem.router.config import RouterConfig, RouterOptions
from tandem.router.policies.table import LEAST_COST
from tandem.router.workers.placement import AUTO
from tandem.worker.config import StoreAccess, WorkerConfig

MAX_MODEL_NAME_LEN = 256
# With adapters and without max_loras.
DEFAULT_MAX_LORAS = 8
# Ray counts a GPU in parts of this size.
_PARTS_PER_GPU = 10_000
# Fields that the launcher sets for each process. `_configured` refuses an unset field.
SET_PER_PROCESS: Mapping[type, Set[str]] = {
    RouterConfig: {
        "router_id",
        "routers",
        "workers",
        "stores",
        "num_restarts",
        "cluster_tls",
        "cluster_host",
        "cluster_port",
        "namespace_secret",
        "adapters",
        "shared_grpc_port",
        "shared_http_port",
        "reuse_ports",
        "request_lines_socket",
        "keeps_request_lines",
    },
    WorkerConfig: {"host", "rack", "num_restarts", "cluster_tls", "store"},
    EngineConfig: {"prefill_cuda_graphs", "max_chunk_tokens", "degree"},
}
# Fields that keep their defaults in every cluster.
FIXED: Mapping[type, Set[str]] = {
    RouterConfig: {
        "heartbeat_timeout_s",
        "stall_timeout_s",
        "decode_word_timeout_s",
        "max_waiting_bytes",
        "max_attempts",
        "admit_duration_s",
    },
    WorkerConfig: {"heartbeat_interval_s", "stall_timeout_s", "connect_timeout_s", "max_record_bytes"},
    PrefillConfig: {"min_shared_tokens", "grant_timeout_s"},
    DecodeConfig: {"lease_duration_s", "admit_grace_s", "max_overtaken", "max_waiting"},
}

_Config = TypeVar("_Config", EngineConfig, RouterConfig, WorkerConfig, PrefillConfig, DecodeConfig, LinkConfig)


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """Configuration of one worker process.

    Attributes:
        has_links: in role `both`: the worker is linked to others and exchanges handovers with them.
        itl_objective_s: in role `both`: ITL to keep beside prompts.
        spans_nodes: other hosts reach the worker's ports, on the address of its node.
        interface: selects that address (tandem.hosts.choose_address).
        stores: with spans_nodes, the page store of each node that has one, by Ray address.
    """

    worker: WorkerConfig
    prefill: PrefillConfig
    decode: DecodeConfig
    links: LinkConfig
    has_links: bool = False
    itl_objective_s: float = 0.0
    spans_nodes: bool = False
    interface: str = ""
    stores: dict[str, StoreAccess] = field(default_factory=dict)

    @property
    def kind(self) -> WorkerKind:
        return "any" if self.worker.role == "both" and self.has_links else self.worker.role


@dataclass(frozen=True, slots=True)
class ClusterConfig(ClusterOptions):
    """A valid set of options. Raises ValueError on construction; the message names the fields.

    Attributes:
        key_file: source of some of the api_keys.
        bounds: bounds of the kinds of processes whose number follows the load, from the number in the kind's field on.
    """

    key_file: KeyFile | None = None
    bounds: Mapping[SizedKind, Bounds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = (
            "num_prefill",
            "num_decode",
            "num_both",
            "num_any",
            "num_routers",
            "num_pages",
            "chunk_size",
            "max_batch_size",
            "prefill_tp",
            "decode_tp",
        )
        for name in (*counts, "max_model_len", "num_threads", "drain_timeout_s", "store_write_after"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, but is {getattr(self, name)}")
        require(self.tp >= 1, f"`tp` must be at least 1, not {self.tp}")
        require(
            re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}", self.cluster_name) is not None,
            f"cluster_name must be 1 to 40 letters, digits, - and _, and begin with a letter or digit, not "
            f"{self.cluster_name!r}",
        )
        names = self.served_model_name
        require(
            all(0 < len(name) <= MAX_MODEL_NAME_LEN and name.isprintable() for name in names),
            f"served_model_name must be 1 to {MAX_MODEL_NAME_LEN} printable characters",
        )
        require(len(names) == len(set(names)), "served_model_name must not be the same name twice")
        self._check_adapters()
        require_one_of(self, "device", DEVICES)
        require_one_of(self, "dtype", ("auto", *DTYPES))
        transports.TRANSPORTS.check("transport", self.transport, device=self.device, besides=(transports.AUTO,))
        require(
            self.workers_per_gpu == 1 or self.transport != "nccl",
            f"`transport` nccl needs a GPU for each end of a link, but workers_per_gpu is {self.workers_per_gpu}: use "
            "`transport` auto or nvlink, which copies within a GPU too",
        )
        require(
            not self.grpc_port or self.grpc_port != self.http_port,
            f"grpc_port and http_port are both {self.grpc_port}",
        )
        require(bool(self.tls_cert) == bool(self.tls_key), "TLS needs both tls_cert and tls_key")
        require(
            not self.tls_client_ca or bool(self.tls_cert),
            "tls_client_ca asks clients for certificates over TLS: it needs tls_cert and tls_key",
        )
        require_one_of(self, "internal_tls", SWITCH)
        require_one_of(self, "mixed_steps", (ON, OFF))
        given = [bool(file) for file in (self.internal_tls_ca, self.internal_tls_cert, self.internal_tls_key)]
        require(
            all(given) or not any(given),
            "certificates for TLS inside the cluster are given by internal_tls_ca, internal_tls_cert and "
            "internal_tls_key together, or made where none of them is given",
        )
        require(not any(given) or self.internal_tls != OFF, "internal_tls off has no use for internal_tls_cert")
        require(
            not self.most("any") or self.most("any") == self.most_workers,
            "num_any makes a cluster of workers that are all alike: it goes without num_prefill, num_decode and "
            "num_both",
        )
        require(
            (self.most("prefill") > 0) == (self.most("decode") > 0),
            f"{self.most('prefill')} prefill and {self.most('decode')} decode workers: both kinds are needed, or "
            "neither",
        )
        require(
            self.most_workers > 0, "at least one worker is needed: num_any, or num_prefill and num_decode, or num_both"
        )
        self._check_bounds()
        require(
            not self.spans_nodes or bool(self.ray_address),
            f"placement_strategy {self.placement_strategy} is for the nodes of a Ray that is there: it needs "
            "ray_address",
        )
        for name in ("interface", "ship_code"):
            require(
                self.spans_nodes or not getattr(self, name),
                f"`{name}` is for a cluster over several nodes: it needs placement_strategy pack or spread",
            )
        require(
            self.spans_nodes or self.ray_autoscaler != ON,
            "ray_autoscaler on is for a cluster over several nodes: it needs placement_strategy pack or spread",
        )
        require(self.node_timeout_s >= 0, f"node_timeout_s must be at least 0, not {self.node_timeout_s:g}")
        require_one_of(self, "ray_autoscaler", SWITCH)
        check_network(self.interface)
        self._check_store()
        self._check_speculation()
        # Their constructors check more.
        self.router("unresolved", self.model, 1)
        self.worker("unresolved", "both", self.engine("unresolved"), 1)
        self._check_ranks()

    def _check_speculation(self) -> None:
        if self.speculation_shared:
            shared = "speculation_shared drafts from the outputs of one API key only"
            require(bool(self.api_keys), f"{shared}: give api_keys or api_key_file")
            require(not self.share_cache_between_keys, f"{shared}: leave share_cache_between_keys out")
        if parse_speculation(self._speculation).is_by_model:
            degrees = [f"`{name}`" for name in ("tp", "prefill_tp", "decode_tp") if getattr(self, name) > 1]
            require(
                self.max_degree == 1,
                f"`speculation` {self.speculation} is for workers of one rank: use `speculation` off, auto or ngram, "
                f"or leave {' and '.join(degrees)} out",
            )

    def _check_adapters(self) -> None:
        for text in self.lora:
            name, found, path = text.partition("=")
            require(bool(found) and bool(path), f"`lora` must be NAME=PATH, not {text!r}")
            check_adapter_name(name)
            require(name not in self.served_model_name, f"`lora` {name!r} is a served_model_name: choose another name")
        names = [name for name, _ in self.adapter_paths]
        require(len(names) == len(set(names)), "`lora` must not give the same name twice")
        require(
            bool(self.lora_root) or not self.admin_keys,
            "admin_keys are for loading adapters while the cluster serves: give lora_root too",
        )
        require(
            bool(self.admin_keys) or not self.lora_root,
            "lora_root is for adapters that are loaded while the cluster serves: give admin_keys too",
        )

    @property
    def _speculation(self) -> str:
        """The option, or its default: auto where its gain is proven."""
        default = AUTO_SPECULATION if self.max_degree == 1 else NO_SPECULATION
        return self.speculation or default

    @property
    def adapter_paths(self) -> list[tuple[str, str]]:
        """Names and directories of the adapters that the cluster starts with."""
        return [(name, path) for name, _, path in (text.partition("=") for text in self.lora)]

    def _check_bounds(self) -> None:
        for kind, bounds in self.bounds.items():
            name = COUNT_FIELDS[kind]
            require(
                getattr(self, name) == bounds.clamp(getattr(self, name)),
                f"{name} is {getattr(self, name)}, outside the bounds {bounds}",
            )
        routers = self.bounds.get("router")
        if routers is not None:
            require(routers.low > 0, f"num_routers {routers}: clients need at least one router")
            require(
                not self.spans_nodes,
                f"num_routers {routers} is for one host: with placement_strategy {self.placement_strategy} give a "
                "number",
            )

    def _check_ranks(self) -> None:
        with_ranks: tuple[tuple[str, Role], ...] = (("prefill_tp", "prefill"), ("decode_tp", "decode"))
        for name, role in with_ranks:
            require(
                not getattr(self, name) or self.most(role) > 0,
                f"`{name}` is for {role} workers, and this cluster has none: use `tp`",
            )
        for name in ("tp", "prefill_tp", "decode_tp"):
            num_ranks = getattr(self, name)
            require(num_ranks <= MAX_DEGREE, f"`{name}` must be at most {MAX_DEGREE}, not {num_ranks}")
            require(
                not num_ranks or max(num_ranks, self.workers_per_gpu) % min(num_ranks, self.workers_per_gpu) == 0,
                f"`{name}` {num_ranks} with workers_per_gpu {self.workers_per_gpu} fills neither whole GPUs nor equal "
                "shares of one: use a multiple of it, or a divisor",
            )
        require(
            self.max_degree == 1 or self.max_batch_size <= MAX_BATCH_SIZE,
            f"max_batch_size must be at most {MAX_BATCH_SIZE} with several ranks, not {self.max_batch_size}",
        )
        require(
            self.workers_per_gpu == 1 or self.max_degree == 1 or self.num_pages > 0,
            f"ranks that share a GPU (workers_per_gpu {self.workers_per_gpu}) cannot measure its memory together: set "
            "num_pages",
        )

    def _check_store(self) -> None:
        given = {
            "store_disk": bool(self.store_disk),
            "store_write_after": self.store_write_after > 0,
            "store_namespace_share": self.store_namespace_share != 1.0,
        }
        for name, is_given in given.items():
            require(bool(self.store_memory) or not is_given, f"{name} is for a page store: it needs store_memory")
        require(
            0 < self.store_namespace_share <= 1,
            f"store_namespace_share must be above 0 and at most 1, but is {self.store_namespace_share}",
        )
        if self.store_memory:
            parse_size("store_memory", self.store_memory)
        if self.store_disk:
            parse_disk("store_disk", self.store_disk)

    @property
    def store_memory_bytes(self) -> int:
        """0 without a page store."""
        return parse_size("store_memory", self.store_memory) if self.store_memory else 0

    @property
    def disk(self) -> StoreDisk | None:
        """The page store's; None without one."""
        return parse_disk("store_disk", self.store_disk) if self.store_disk else None

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode + self.num_both + self.num_any

    def most(self, kind: SizedKind) -> int:
        """Returns the upper bound of a kind, or its number."""
        number: int = getattr(self, COUNT_FIELDS[kind])
        return self.bounds[kind].high if kind in self.bounds else number

    @property
    def most_workers(self) -> int:
        return sum(map(self.most, WORKER_KINDS))

    @property
    def largest(self) -> "ClusterConfig":
        """The same cluster with as many processes as its bounds allow."""
        return replace(self, bounds={}, **in_fields({kind: bounds.high for kind, bounds in self.bounds.items()}))

    def degree_of(self, role: Role) -> int:
        """Returns the number of ranks of a worker with this role."""
        own = {"prefill": self.prefill_tp, "decode": self.decode_tp}
        return own.get(role) or self.tp

    @property
    def num_ranks(self) -> int:
        """Of all workers together."""
        return (
            self.num_prefill * self.degree_of("prefill")
            + self.num_decode * self.degree_of("decode")
            + (self.num_both + self.num_any) * self.tp
        )

    @property
    def max_degree(self) -> int:
        """Ranks of the cluster's largest worker."""
        counts = {
            "prefill": self.most("prefill"),
            "decode": self.most("decode"),
            "both": self.most("both") + self.most("any"),
        }
        return max(self.degree_of(role) for role in ROLES if counts[role])

    @property
    def num_routers_started(self) -> int:
        """A GPU decodes about as many tokens per second as one router relays."""
        return self.num_routers or (1 if self.device == "cpu" else self.most_workers - self.most("prefill"))

    @property
    def spans_nodes(self) -> bool:
        return self.placement_strategy != HOST

    @property
    def num_gpus(self) -> int:
        return -(-self.num_ranks // self.workers_per_gpu) if self.device == "cuda" else 0

    @property
    def gpus_per_rank(self) -> float:
        """Amount of Ray's resource "GPU" for each rank of a worker; 0.0 on CPUs."""
        return self._gpus_for(1)

    def gpus_of(self, role: Role) -> float:
        """Returns the amount of Ray's resource "GPU" for a worker with this role; 0.0 on CPUs."""
        return self._gpus_for(self.degree_of(role))

    def _gpus_for(self, num_ranks: int) -> float:
        num_gpus, rest = divmod(num_ranks, self.workers_per_gpu)
        share = _PARTS_PER_GPU // self.workers_per_gpu * rest / _PARTS_PER_GPU
        return num_gpus + share if self.device == "cuda" else 0.0

    @property
    def plans_roles(self) -> bool:
        return self.most("any") > 1 and self.placement == AUTO and self._routing == LEAST_COST

    @property
    def _routing(self) -> str:
        if self.routing != AUTO:
            return self.routing
        default: str = default_of(RouterConfig, "routing")
        return LEAST_COST if self.most("any") else default

    @property
    def _device_defaults(self) -> DeviceDefaults:
        return DEVICE_DEFAULTS[self.device]

    def engine(self, model_dir: str, num_threads: int = 0) -> EngineConfig:
        """Returns the engine configuration without a role's values. num_threads is the default of the option."""
        return _configured(
            EngineConfig,
            _values(self, EngineOptions)
            | {
                "model_dir": model_dir,
                "dtype": self._device_defaults.dtype if self.dtype == "auto" else self.dtype,
                "num_pages": self.num_pages or self._device_defaults.num_pages,
                "max_loras": self.max_loras or (DEFAULT_MAX_LORAS if self.lora or self.lora_root else 0),
                "max_batch_size": self.max_batch_size,
                "max_drafts": 0 if self._speculation == NO_SPECULATION else MAX_DRAFTS,
                "mixed_steps": self.mixed_steps == ON,
                "num_threads": self.num_threads or num_threads,
                # Of all roles: prefills write the drafter's pages too.
                "drafter": self._speculation if parse_speculation(self._speculation).is_by_model else "",
            },
        )

    def router(self, model_dir: str, model_name: str, max_model_len: int, cluster_token: str = "") -> RouterConfig:
        """Returns the routers' common configuration. model_name is the default of served_model_name."""
        first, *others = self.served_model_name or (model_name,)
        return _configured(
            RouterConfig,
            _values(self, RouterOptions)
            | {
                "model_dir": model_dir,
                "routing": self._routing,
                "model_name": first,
                "other_model_names": tuple(others),
                "max_model_len": max_model_len,
                "tls": self._tls,
                "key_file": self.key_file,
                "cluster_token": cluster_token,
                "takes_adapters": bool(self.lora_root),
                "shares_drafts": self.speculation_shared,
                "starts_from_zero": has_zero(self.bounds),
                "chat_template": _absolute(self.chat_template),
                "log": self._log,
            },
        )

    def store(
        self,
        store_id: str,
        address: str,
        routers: tuple[str, ...],
        region_socket: str,
        cluster_token: str,
        rack: str = "",
        namespace_secret: str = "",
    ) -> StoreConfig:
        """Args: address: of the store's port. routers: addresses of their ports for workers and stores."""
        host, _, port = address.rpartition(":")
        return StoreConfig(
            store_id,
            region_socket,
            host,
            int(port),
            routers,
            rack,
            disk=self.disk,
            namespace_secret=namespace_secret,
            namespace_share=self.store_namespace_share,
            cluster_token=cluster_token,
            api_keys=self.api_keys,
            key_file=self.key_file,
            log=self._log,
        )

    @property
    def _tls(self) -> TlsConfig | None:
        return TlsConfig(*map(_absolute, (self.tls_cert, self.tls_key, self.tls_client_ca))) if self.tls_cert else None

    @property
    def _log(self) -> LogConfig:
        return LogConfig(self.log_level, _absolute(self.log_dir))

    def worker(
        self,
        worker_id: str,
        role: Role,
        engine: EngineConfig,
        max_model_len: int,
        cluster_token: str = "",
    ) -> WorkerPlan:
        chunk_size = self.chunk_size or self._device_defaults.chunk_size
        max_batch_size = self.max_batch_size or self._device_defaults.max_batch_size
        largest_step = 0 if role == "prefill" else max_batch_size
        overlap = not self.disable_overlap_schedule
        engine = replace(
            engine,
            cuda_graph_max_bs=min(engine.cuda_graph_max_bs, largest_step),
            prefill_cuda_graphs=engine.cuda_graph_max_bs > 0,
            mixed_steps=engine.mixed_steps and role == "both",
            max_chunk_tokens=0 if role == "decode" else chunk_size,
            max_batch_size=largest_step,
            max_model_len=max_model_len,
            degree=self.degree_of(role),
        )
        worker = _configured(
            WorkerConfig,
            {
                "worker_id": worker_id,
                "role": role,
                "engine": engine,
                "max_model_len": max_model_len,
                "lora_root": _absolute(self.lora_root),
                "cluster_token": cluster_token,
                "api_keys": self.api_keys,
                "key_file": self.key_file,
                "log": self._log,
            },
        )
        prefill = _values(self, PrefillOptions) | {"chunk_size": chunk_size, "overlap": overlap}
        itl_objective_s = self.itl_objective_ms / 1e3
        decode = _values(self, DecodeOptions) | {
            "speculation": self._speculation,
            "max_batch_size": max_batch_size,
            "overlap": overlap,
            "itl_objective_s": itl_objective_s,
        }
        is_auto = self.transport == transports.AUTO
        candidates = transports.TRANSPORTS.for_device(self.device) if is_auto else (self.transport,)
        return WorkerPlan(
            worker,
            _configured(PrefillConfig, prefill),
            _configured(DecodeConfig, decode),
            _configured(LinkConfig, {"transports": candidates}),
            has_links=role != "both" or self.most("any") > 0,
            itl_objective_s=itl_objective_s,
            spans_nodes=self.spans_nodes,
            interface=self.interface,
        )


def _absolute(path: str) -> str:
    """Processes may run in another working directory. "" stays."""
    return str(Path(path).absolute()) if path else ""


def _values(config: ClusterOptions, options: type) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in fields(options)}


def _configured(kind: type[_Config], values: Mapping[str, Any]) -> _Config:
    """Raises TypeError: a field is not in exactly one of `values`, SET_PER_PROCESS and FIXED."""
    set_by = Counter([*values, *SET_PER_PROCESS.get(kind, ()), *FIXED.get(kind, ())])
    names = {f.name for f in fields(kind)}
    if wrong := sorted(name for name in names | set_by.keys() if name not in names or set_by[name] != 1):
        raise TypeError(f"set {', '.join(wrong)} of {kind.__name__} in one of values, SET_PER_PROCESS and FIXED")
    return kind(**values)
