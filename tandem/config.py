"""What configurations of several packages have in common: frozen dataclasses, validated on construction.

Each package's own is in its `config.py`. Nothing here imports torch: the router and the command line read this too.
"""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

Role = Literal["prefill", "decode", "both"]
ROLES: tuple[Role, ...] = ("prefill", "decode", "both")
# Workers as they are counted: of each role, and those that do both with links to each other.
WorkerKind = Role | Literal["any"]
WORKER_KINDS: tuple[WorkerKind, ...] = (*ROLES, "any")
DEVICES = ("cpu", "cuda")
LOG_LEVELS = ("debug", "info", "warning", "error")
# Every certificate that the processes of a cluster show each other is for this name, whatever their hosts are called.
# It is in no DNS: who has signed a certificate is what counts.
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
    """The default of a configuration's field, for another one that passes the field on: it is stated once."""
    (default,) = [f.default for f in fields(config) if f.name == name]
    assert default is not MISSING
    return default


def require_api_key(key: str) -> None:
    # A key travels in a header, where anything else would never match.
    require(
        bool(key) and key.isascii() and key.isprintable() and " " not in key,
        "an API key must be printable ASCII without spaces",
    )


class ApiKey(NamedTuple):
    """A key that lets a client in. Attributes: max_priority: what it may ask for at most; None: what all may."""

    key: str
    max_priority: int | None = None


def parse_api_key(text: str) -> ApiKey:
    """The key of a configuration: "KEY", or "KEY MAX_PRIORITY".

    Raises:
        ValueError: it is neither. The message does not repeat it.
    """
    key, _, limit = text.partition(" ")
    require_api_key(key)
    if not limit:
        return ApiKey(key)
    require(
        limit.removeprefix("-").isdecimal() and abs(int(limit)) < 2**31,
        "an API key must be printable ASCII without spaces; behind it, after a space, may stand the largest priority "
        "that it may ask for, a whole number",
    )
    return ApiKey(key, int(limit))


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """TLS on the clients' ports.

    Attributes:
        cert_file, key_file: PEM files: the server's certificate chain and its private key.
        client_ca_file: PEM file; if set, a client must show a certificate that one of these authorities signed.
    """

    cert_file: str
    key_file: str
    client_ca_file: str = ""

    def __post_init__(self) -> None:
        require(bool(self.cert_file and self.key_file), "TLS needs both a certificate and a key")


@dataclass(frozen=True, slots=True)
class ClusterTls:
    """TLS between the processes of a cluster, each of which shows the others a certificate.

    Attributes:
        ca: PEM: the authorities one of which must have signed whatever another process shows.
        cert, key: PEM: what this process shows, with the chain above it, and the private key of that.
    """

    ca: bytes = field(repr=False)
    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)

    def read(self) -> "ClusterTls":
        """As ClusterTlsFiles."""
        return self


@dataclass(frozen=True, slots=True)
class ClusterTlsFiles:
    """The same in files, which every process reads on its own host: no key goes from one to another.

    Attributes:
        ca_file, cert_file, key_file: PEM files, as the fields of ClusterTls.
    """

    ca_file: str
    cert_file: str
    key_file: str

    def read(self) -> ClusterTls:
        """What they have now: others may have taken their place since.

        Raises:
            OSError: one cannot be read.
        """
        return ClusterTls(*(Path(file).read_bytes() for file in (self.ca_file, self.cert_file, self.key_file)))


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What a process writes about itself.

    Attributes:
        level: debug adds a line for every batch.
        directory: where each process has its file; empty: standard error.
    """

    level: str = "info"
    directory: str = ""

    def __post_init__(self) -> None:
        require_one_of(self, "level", LOG_LEVELS)
