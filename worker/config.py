"""Options of a worker process, for all roles. Nothing here imports torch."""

from dataclasses import dataclass, field

from tandem.config import (
    ROLES,
    WORKER_SILENCE_LIMIT_S,
    ClusterTls,
    ClusterTlsFiles,
    LogConfig,
    Role,
    require_one_of,
    require_positive,
)
from tandem.engine.config import EngineConfig
from tandem.key_file import KeyFile


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """The page store of the worker's node.

    Attributes:
        address: its port, which a restarted store keeps.
        region_socket: path of the socket of the region's holder.
        write_after: hits before a page is written to the store; 0: every page is.
    """

    address: str
    region_socket: str
    write_after: int = 0


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Options of one worker process.

    Attributes:
        worker_id: name in the cluster; a restarted worker keeps it.
        max_model_len: maximum of prompt and output tokens together.
        host: address to which the ports are bound.
        rack: name shared by the hosts of one rack; "" if unknown.
        heartbeat_interval_s: time between heartbeats to a router.
        stall_timeout_s: time without a scheduler step after which the process ends itself, to be restarted.
        connect_timeout_s: time without any reachable router after which the worker gives up.
        max_record_bytes: memory for records of served requests, from which HTTP clients resume; the oldest are dropped.
        cluster_token: shared secret of the cluster's processes.
        cluster_tls: TLS between the cluster's processes; None for plain connections.
        store: None: the cluster has no page store.
        num_restarts: number of restarts of this worker so far.
        lora_root: directory below which adapters are loaded while the cluster serves; "": none are.
        api_keys: keys accepted from readers of the metrics; empty admits everybody.
        key_file: file with some of them, read again when it changes; None: there is none.
    """

    worker_id: str
    role: Role
    engine: EngineConfig
    max_model_len: int
    host: str = "127.0.0.1"
    rack: str = ""
    heartbeat_interval_s: float = 0.25
    stall_timeout_s: float = WORKER_SILENCE_LIMIT_S
    connect_timeout_s: float = 60.0
    max_record_bytes: int = 64 * 2**20
    store: StoreAccess | None = None
    num_restarts: int = 0
    lora_root: str = ""
    cluster_token: str = field(default="", repr=False)
    cluster_tls: ClusterTls | ClusterTlsFiles | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    key_file: KeyFile | None = None
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        require_one_of(self, "role", ROLES)
        require_positive(self, "max_model_len", "heartbeat_interval_s", "stall_timeout_s", "connect_timeout_s")
        require_positive(self, "max_record_bytes")
