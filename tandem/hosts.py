"""This host's identity and addresses, as other hosts of the cluster see them (Linux, IPv4)."""

import array
import fcntl
import functools
import ipaddress
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

# netdevice(7): struct ifconf and struct ifreq on 64-bit systems. A Struct cannot be pickled with `own_addresses`.
_SIOCGIFCONF = 0x8912
_IFCONF = "iP"
_IFREQ = "16s4x4s16x"
_MAX_ADDRESSES = 1024
# A process with its own network counts as another host.
_NAMESPACES = ("pid", "ipc", "net")


@functools.cache
def host_id() -> str:
    """Return an id that two processes share only on one host, in one boot and in the same namespaces."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([boot, *(str(Path(f"/proc/self/ns/{name}").stat().st_ino) for name in _NAMESPACES)])


def own_addresses() -> list[tuple[str, str]]:
    """Return (interface, IPv4 address) pairs, including loopback."""
    buffer = array.array("B", bytes(_MAX_ADDRESSES * struct.calcsize(_IFREQ)))
    location, num_bytes = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as some:
        filled, _ = struct.unpack(_IFCONF, fcntl.ioctl(some, _SIOCGIFCONF, struct.pack(_IFCONF, num_bytes, location)))
    return [
        # The alias eth0:1 belongs to eth0.
        (name.split(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(packed))
        for name, packed in struct.iter_unpack(_IFREQ, buffer.tobytes()[:filled])
    ]


def choose_address(addresses: Sequence[tuple[str, str]], network: str, default: str) -> str:
    """Choose the address at which other hosts reach this one.

    Args:
        network: an interface's name, or a network like "10.0.0.0/16"; "" selects `default`, the address of Ray's node.

    Raises:
        ValueError: no address matches.
    """
    if not network:
        return default
    found = [address for interface, address in addresses if _is_in(network, interface, address)]
    if not found:
        has = ", ".join(f"{address} ({interface})" for interface, address in addresses)
        raise ValueError(f"no address is of interface {network}: there are {has}")
    # Ray's own choice is known to be reachable.
    return default if default in found else found[0]


def check_network(network: str) -> None:
    """Raise ValueError if `network` looks like a network but is not one."""
    if "/" in network:
        try:
            ipaddress.IPv4Network(network, strict=False)
        except ValueError as error:
            raise ValueError(f"interface {network} is no IPv4 network such as 10.0.0.0/16: {error}") from error


def interface_of(address: str) -> str:
    """Return the interface with this address, or ""."""
    return next((interface for interface, own in own_addresses() if own == address), "")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def _is_in(network: str, interface: str, address: str) -> bool:
    if "/" in network:
        return ipaddress.IPv4Address(address) in ipaddress.IPv4Network(network, strict=False)
    return interface == network
