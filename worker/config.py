"""What the process of a worker can be told, whatever its role. Nothing here imports torch."""

from dataclasses import dataclass, field

from tandem.config import ROLES, ClusterTls, ClusterTlsFiles, LogConfig, Role, require_one_of, require_positive
from tandem.engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker process.

    Attributes:
        worker_id: its name in the cluster; a restarted worker keeps it.
        max_model_len: prompt and output tokens together, at most.
        host: the address its ports are bound to.
        rack: the same for hosts of one rack; "": nobody has said.
        heartbeat_interval_s: seconds between heartbeats to the router.
        stall_timeout_s: time without a scheduler step after which the process ends itself, to be started again.
        connect_timeout_s: how long it looks for the router before it gives up.
        max_record_bytes: for records of what it has served, which clients over HTTP go on with; the oldest give way.
        cluster_token: what the processes of this cluster know each other by.
        cluster_tls: between them; None: plain.
        num_restarts: how often this worker has been started again.
        api_keys: what readers of its metrics show; empty lets everybody in.
    """

    worker_id: str
    role: Role
    engine: EngineConfig
    max_model_len: int
    host: str = "127.0.0.1"
    rack: str = ""
    heartbeat_interval_s: float = 0.25
    stall_timeout_s: float = 60.0
    connect_timeout_s: float = 60.0
    max_record_bytes: int = 64 * 2**20
    num_restarts: int = 0
    cluster_token: str = field(default="", repr=False)
    cluster_tls: ClusterTls | ClusterTlsFiles | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        require_one_of(self, "role", ROLES)
        require_positive(self, "max_model_len", "heartbeat_interval_s", "stall_timeout_s", "connect_timeout_s")
        require_positive(self, "max_record_bytes")
