"""Configuration of a node's page store."""

from dataclasses import dataclass, field

from tandem.config import ClusterTls, ClusterTlsFiles, LogConfig, require_positive
from tandem.key_file import KeyFile


@dataclass(frozen=True, slots=True)
class StoreDisk:
    """Attributes: directory: absolute; num_bytes: most that its segments take."""

    directory: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Options of one store process.

    Attributes:
        store_id: name in the cluster; a restarted store keeps it.
        region_socket: path of the socket of the region's holder.
        host, port: address of the gRPC port, which a restarted store keeps.
        routers: the routers' ports for workers and stores, each "host:port".
        rack: equal for hosts of one rack; "" if unknown.
        disk: None: there is no tier on disk.
        namespace_secret: secret of the cluster's cache namespaces, which the disk's folder keeps; "" without a disk.
        namespace_share: largest part of the memory for the pages of one API key.
        cluster_token, cluster_tls, num_restarts, api_keys, key_file, log: as in WorkerConfig.
    """

    store_id: str
    region_socket: str
    host: str
    port: int
    routers: tuple[str, ...] = ()
    rack: str = ""
    disk: StoreDisk | None = None
    namespace_secret: str = field(default="", repr=False)
    namespace_share: float = 1.0
    cluster_token: str = field(default="", repr=False)
    cluster_tls: ClusterTls | ClusterTlsFiles | None = None
    num_restarts: int = 0
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    key_file: KeyFile | None = None
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        require_positive(self, "port")
