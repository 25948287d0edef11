"""This host, as the cluster's other hosts see it: what tells it from them, and its addresses (Linux, IPv4)."""

import array
import fcntl
import functools
import ipaddress
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

# Of netdevice(7): struct ifconf, and struct ifreq with the address that it holds on 64-bit systems. (They are sent to
# nodes of Ray's with `own_addresses`, which a Struct cannot be.)
_SIOCGIFCONF = 0x8912
_IFCONF = "iP"
_IFREQ = "16s4x4s16x"
_MAX_ADDRESSES = 1024
# What processes must have in common to map each other's memory, through /proc or CUDA, and to see each other exit. Who
# has a network of its own is a host of its own to all others.
_NAMESPACES = ("pid", "ipc", "net")


@functools.cache
def host_id() -> str:
    """Two processes have the same exactly if they are on one host and in the same namespaces there: only then may one
    map the other's memory or watch its process id. It changes when the host starts anew."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([boot, *(str(Path(f"/proc/self/ns/{name}").stat().st_ino) for name in _NAMESPACES)])


def own_addresses() -> list[tuple[str, str]]:
    """The IPv4 addresses of this host's interfaces, loopback too, each behind its interface's name."""
    buffer = array.array("B", bytes(_MAX_ADDRESSES * struct.calcsize(_IFREQ)))
    location, num_bytes = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as some:
        filled, _ = struct.unpack(_IFCONF, fcntl.ioctl(some, _SIOCGIFCONF, struct.pack(_IFCONF, num_bytes, location)))
    return [
        # An alias such as eth0:1 is an address of eth0.
        (name.split(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(packed))
        for name, packed in struct.iter_unpack(_IFREQ, buffer.tobytes()[:filled])
    ]


def choose_address(addresses: Sequence[tuple[str, str]], network: str, default: str) -> str:
    """Which of a host's addresses the cluster's other hosts reach it at.

    Args:
        addresses: as `own_addresses` returns them.
        network: the name of an interface, or a network such as "10.0.0.0/16"; "": `default`.
        default: taken without a network; "host" of Ray's node.

    Raises:
        ValueError: the host has no such interface, or no address in that network.
    """
    if not network:
        return default
    found = [address for interface, address in addresses if _is_in(network, interface, address)]
    if not found:
        has = ", ".join(f"{address} ({interface})" for interface, address in addresses)
        raise ValueError(f"no address is of interface {network}: there are {has}")
    # One that Ray has chosen is known to be reached.
    return default if default in found else found[0]


def check_network(network: str) -> None:
    """Raises ValueError: it looks like a network and is none."""
    if "/" in network:
        try:
            ipaddress.IPv4Network(network, strict=False)
        except ValueError as error:
            raise ValueError(f"interface {network} is no IPv4 network such as 10.0.0.0/16: {error}") from error


def interface_of(address: str) -> str:
    """The name of the interface that has one of this host's addresses; "" if none has it."""
    return next((interface for interface, own in own_addresses() if own == address), "")


def is_loopback(host: str) -> bool:
    """Whether only this host reaches what listens there. Args: host: an address, or a name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_any(host: str) -> bool:
    """Whether what listens there listens at all of its host's addresses."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def _is_in(network: str, interface: str, address: str) -> bool:
    if "/" in network:
        return ipaddress.IPv4Address(address) in ipaddress.IPv4Network(network, strict=False)
    return interface == network
