"""A whole cluster, and what it means for each of its processes.

Nothing here imports torch: the command line reads this too.
"""

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tandem.config import DEVICES, LogConfig, Role, TlsConfig, WorkerKind, default_of, require, require_one_of
from tandem.decode_worker.config import DecodeConfig
from tandem.deploy.config.cluster_options import DEVICE_DEFAULTS, OFF, ON, SWITCH, ClusterOptions, DeviceDefaults
from tandem.deploy.config.node_choice import HOST
from tandem.engine.config import DTYPES, EngineConfig
from tandem.hosts import check_network
from tandem.kvtransfer.config import LinkConfig
from tandem.kvtransfer.transports import table as transports
from tandem.prefill_worker.config import PrefillConfig
from tandem.router.config import RouterConfig
from tandem.router.policies.table import LEAST_COST
from tandem.router.workers.placement import AUTO
from tandem.worker.config import WorkerConfig

# A name comes back with every answer.
MAX_MODEL_NAME_LEN = 256
# Without tensor parallelism a model runs on one device.
DEVICES_PER_WORKER: int = default_of(EngineConfig, "num_devices")


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What one worker's process is told: what all are, and what those of its role are.

    Attributes:
        has_links: in role `both`, whether it hands over to others and takes over from them.
        itl_objective_s: in role `both`, the time between two tokens that prompts beside them leave.
        spans_nodes: whether its ports are for other hosts too, on the address of whichever node it is on.
        interface: which of a node's addresses that is (tandem.hosts.choose_address).
    """

    worker: WorkerConfig
    prefill: PrefillConfig
    decode: DecodeConfig
    links: LinkConfig
    has_links: bool = False
    itl_objective_s: float = 0.0
    spans_nodes: bool = False
    interface: str = ""

    @property
    def kind(self) -> WorkerKind:
        return "any" if self.worker.role == "both" and self.has_links else self.worker.role


@dataclass(frozen=True, slots=True)
class ClusterConfig(ClusterOptions):
    """A whole cluster, as `tandem serve` starts it; ClusterOptions says what the fields mean.

    Raises:
        ValueError: on construction, for values of which no cluster can be made; the message names the fields.
    """

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
        )
        for name in (*counts, "max_model_len", "num_threads", "drain_timeout_s"):
            require(getattr(self, name) >= 0, f"{name} must not be negative, but is {getattr(self, name)}")
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
        require_one_of(self, "device", DEVICES)
        require_one_of(self, "dtype", ("auto", *DTYPES))
        transports.TRANSPORTS.check("transport", self.transport, device=self.device, besides=(transports.AUTO,))
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
            not self.num_any or self.num_any == self.num_workers,
            "num_any makes a cluster of workers that are all alike: it goes without num_prefill, num_decode and "
            "num_both",
        )
        require(
            (self.num_prefill > 0) == (self.num_decode > 0),
            f"{self.num_prefill} prefill and {self.num_decode} decode workers: both kinds are needed, or neither",
        )
        require(
            self.num_workers > 0, "at least one worker is needed: num_any, or num_prefill and num_decode, or num_both"
        )
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
        check_network(self.interface)
        # What its processes would refuse is refused before any of them starts.
        self.router("unresolved", self.model, 1)
        self.worker("unresolved", "both", self.engine("unresolved"), 1)

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode + self.num_both + self.num_any

    @property
    def num_routers_started(self) -> int:
        """A GPU decodes about as many tokens in a second as one router passes on."""
        return self.num_routers or (1 if self.device == "cpu" else self.num_workers - self.num_prefill)

    @property
    def spans_nodes(self) -> bool:
        """Whether its processes may be on several nodes of a Ray."""
        return self.placement_strategy != HOST

    @property
    def num_devices(self) -> int:
        """Devices of all workers together."""
        return self.num_workers * DEVICES_PER_WORKER

    @property
    def plans_roles(self) -> bool:
        """Whether workers are to lean to one kind of work or the other, as the load has it."""
        return self.num_any > 1 and self.placement == AUTO and self._routing == LEAST_COST

    @property
    def _routing(self) -> str:
        if self.routing != AUTO:
            return self.routing
        default: str = default_of(RouterConfig, "routing")
        return LEAST_COST if self.num_any else default

    @property
    def _device_defaults(self) -> DeviceDefaults:
        return DEVICE_DEFAULTS[self.device]

    def engine(self, model_dir: str, num_threads: int = 0) -> EngineConfig:
        """What each worker's engine is told. Args: num_threads: where none are configured."""
        return EngineConfig(
            **_passed_on(self, EngineConfig)
            | {
                "model_dir": model_dir,
                "dtype": self._device_defaults.dtype if self.dtype == "auto" else self.dtype,
                "num_pages": self.num_pages or self._device_defaults.num_pages,
                "mixed_steps": self.mixed_steps == ON,
                "num_threads": self.num_threads or num_threads,
            }
        )

    def router(self, model_dir: str, model_name: str, max_model_len: int, cluster_token: str = "") -> RouterConfig:
        """What every router is told. Args: model_name: where no other is configured."""
        first, *others = self.served_model_name or (model_name,)
        return RouterConfig(
            **_passed_on(self, RouterConfig)
            | {
                "model_dir": model_dir,
                "routing": self._routing,
                "model_name": first,
                "other_model_names": tuple(others),
                "max_model_len": max_model_len,
                # A process's working directory may be another, so paths are whole.
                "tls": TlsConfig(*map(_whole, (self.tls_cert, self.tls_key, self.tls_client_ca)))
                if self.tls_cert
                else None,
                "cluster_token": cluster_token,
                "chat_template": _whole(self.chat_template),
                "log": LogConfig(self.log_level, _whole(self.log_dir)),
            }
        )

    def worker(
        self,
        worker_id: str,
        role: Role,
        engine: EngineConfig,
        max_model_len: int,
        cluster_token: str = "",
    ) -> WorkerPlan:
        """What one worker is told."""
        chunk_size = self.chunk_size or self._device_defaults.chunk_size
        max_batch_size = self.max_batch_size or self._device_defaults.max_batch_size
        largest_step = 0 if role == "prefill" else max_batch_size
        overlap = not self.disable_overlap_schedule
        engine = replace(
            engine,
            cuda_graph_max_bs=min(engine.cuda_graph_max_bs, largest_step),
            # Who wants no graphs of decode steps wants none.
            prefill_cuda_graphs=engine.cuda_graph_max_bs > 0,
            mixed_steps=engine.mixed_steps and role == "both",
            max_chunk_tokens=0 if role == "decode" else chunk_size,
            max_batch_size=largest_step,
            max_model_len=max_model_len,
        )
        worker = WorkerConfig(
            **_passed_on(self, WorkerConfig)
            | {
                "worker_id": worker_id,
                "role": role,
                "engine": engine,
                "max_model_len": max_model_len,
                # The clients' address is the router's alone.
                "host": default_of(WorkerConfig, "host"),
                "cluster_token": cluster_token,
                "log": LogConfig(self.log_level, _whole(self.log_dir)),
            }
        )
        named = (
            (self.transport,) if self.transport != transports.AUTO else transports.TRANSPORTS.for_device(self.device)
        )
        return WorkerPlan(
            worker,
            PrefillConfig(**_passed_on(self, PrefillConfig) | {"chunk_size": chunk_size, "overlap": overlap}),
            DecodeConfig(**_passed_on(self, DecodeConfig) | {"max_batch_size": max_batch_size, "overlap": overlap}),
            LinkConfig(**_passed_on(self, LinkConfig) | {"transports": named}),
            has_links=role != "both" or self.num_any > 0,
            itl_objective_s=self.itl_objective_ms / 1e3,
            spans_nodes=self.spans_nodes,
            interface=self.interface,
        )


def _whole(path: str) -> str:
    """A path from the root; "" stays."""
    return str(Path(path).absolute()) if path else ""


def _passed_on(config: ClusterOptions, to: type) -> dict[str, Any]:
    """What a process's configuration has under the same name."""
    names = {f.name for f in fields(config)} & {f.name for f in fields(to)}
    return {name: getattr(config, name) for name in names}
