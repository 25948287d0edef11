"""Parts common to the packages' configurations (`config.py` in each). Imports no torch."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

Role = Literal["prefill", "decode", "both"]
ROLES: tuple[Role, ...] = ("prefill", "decode", "both")
# "any" are workers of `--workers`, with links to each other.
WorkerKind = Role | Literal["any"]
WORKER_KINDS: tuple[WorkerKind, ...] = (*ROLES, "any")
DEVICES = ("cpu", "cuda")
LOG_LEVELS = ("debug", "info", "warning", "error")
# In every certificate inside a cluster. It is in no DNS: the signing authority counts.
SERVER_NAME = "cluster.tandem.internal"


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def require_one_of(config: object, name: str, choices: Sequence[str]) -> None:
    value = getattr(config, name)
    require(value in choices, f"{name} must be one of {', '.join(choices)}, not {value!r}")


# Supervision of workers, in seconds: a process that answers no probe for the limit is killed, and started again after
# the delay. One whose scheduler stands still for the limit ends itself.
WORKER_SILENCE_LIMIT_S = 60.0
WORKER_PROBE_INTERVAL_S = 2.0
RESTART_DELAY_S = 1.0


def require_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        require(value > 0, f"{name} must be above 0, not {value}")


def default_of(config: type, name: str) -> Any:
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
    """Attributes: max_priority: highest priority that the key may request; None: the general limit."""

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
    """TLS on the client ports, from PEM files.

    Attributes:
        client_ca_file: authorities; if set, clients must present a certificate that one of them signed.
    """

    cert_file: str
    key_file: str
    client_ca_file: str = ""

    def __post_init__(self) -> None:
        require(bool(self.cert_file and self.key_file), "TLS needs both a certificate and a key")


@dataclass(frozen=True, slots=True)
class ClusterTls:
    """Mutual TLS between the processes of a cluster, as PEM data. Attributes: ca: the trusted authorities."""

    ca: bytes = field(repr=False)
    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)

    def read(self) -> "ClusterTls":
        return self


@dataclass(frozen=True, slots=True)
class ClusterTlsFiles:
    """ClusterTls in files that every process reads on its own host, so no key travels."""

    ca_file: str
    cert_file: str
    key_file: str

    def read(self) -> ClusterTls:
        """Read the current files, which may have been replaced. Raises OSError."""
        return ClusterTls(*(Path(file).read_bytes() for file in (self.ca_file, self.cert_file, self.key_file)))


@dataclass(frozen=True, slots=True)
class LogConfig:
    level: str = "info"
    directory: str = ""

    def __post_init__(self) -> None:
        require_one_of(self, "level", LOG_LEVELS)
