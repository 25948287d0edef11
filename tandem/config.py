"""Parts shared by the configurations of several packages: frozen dataclasses, validated on construction.

Each package's own configuration is in its `config.py`. Nothing here imports torch.
"""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

Role = Literal["prefill", "decode", "both"]
ROLES: tuple[Role, ...] = ("prefill", "decode", "both")
# Worker counts per role; "any" are workers of `--workers`, with links to each other.
WorkerKind = Role | Literal["any"]
WORKER_KINDS: tuple[WorkerKind, ...] = (*ROLES, "any")
DEVICES = ("cpu", "cuda")
LOG_LEVELS = ("debug", "info", "warning", "error")
# Every certificate inside a cluster carries this name. It is in no DNS: the signing authority counts.
SERVER_NAME = "cluster.tandem.internal"


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def require_one_of(config: object, name: str, choices: Sequence[str]) -> None:
    value = getattr(config, name)
    require(value in choices, f"{name} must be one of {', '.join(choices)}, not {value!r}")


def require_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value > 0, f"{name} must be above 0, not {value}")


def default_of(config: type, name: str) -> Any:
    """Return the default of a configuration's field, so that it is declared once."""
    (default,) = [f.default for f in fields(config) if f.name == name]
    assert default is not MISSING
    return default


def require_api_key(key: str) -> None:
    # A key travels in a header.
    require(
        bool(key) and key.isascii() and key.isprintable() and " " not in key,
        "an API key must be printable ASCII without spaces",
    )


class ApiKey(NamedTuple):
    """An API key. Attributes: max_priority: highest priority it may ask for; None: the general limit."""

    key: str
    max_priority: int | None = None


def parse_api_key(text: str) -> ApiKey:
    """Parse "KEY" or "KEY MAX_PRIORITY".

    Raises:
        ValueError: the text is neither. The message does not repeat it.
    """
    key, _, limit = text.partition(" ")
    require_api_key(key)
    if not limit:
        return ApiKey(key)
    require(
        limit.removeprefix("-").isdecimal() and abs(int(limit)) < 2**31,
        "an API key must be printable ASCII without spaces, optionally followed by a space and the highest priority "
        "that it may ask for, a whole number",
    )
    return ApiKey(key, int(limit))


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """TLS on the client ports.

    Attributes:
        cert_file, key_file: PEM files of the server's certificate chain and private key.
        client_ca_file: PEM file of authorities; if set, clients must present a certificate that one of them signed.
    """

    cert_file: str
    key_file: str
    client_ca_file: str = ""

    def __post_init__(self) -> None:
        require(bool(self.cert_file and self.key_file), "TLS needs both a certificate and a key")


@dataclass(frozen=True, slots=True)
class ClusterTls:
    """Mutual TLS between the processes of a cluster.

    Attributes:
        ca: PEM of the trusted authorities.
        cert, key: PEM of this process's certificate chain and private key.
    """

    ca: bytes = field(repr=False)
    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)

    def read(self) -> "ClusterTls":
        """Return itself; see ClusterTlsFiles.read."""
        return self


@dataclass(frozen=True, slots=True)
class ClusterTlsFiles:
    """ClusterTls in PEM files that every process reads on its own host, so no key travels."""

    ca_file: str
    cert_file: str
    key_file: str

    def read(self) -> ClusterTls:
        """Read the current files; they may have been replaced.

        Raises:
            OSError: a file cannot be read.
        """
        return ClusterTls(*(Path(file).read_bytes() for file in (self.ca_file, self.cert_file, self.key_file)))


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Logging of a process.

    Attributes:
        level: debug adds a line per batch.
        directory: directory of the log files; "" for standard error.
    """

    level: str = "info"
    directory: str = ""

    def __post_init__(self) -> None:
        require_one_of(self, "level", LOG_LEVELS)
