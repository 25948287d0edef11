"""Limits on health watches, which need no key: no client may take the places of all others."""

import functools
import ipaddress
import urllib.parse
from collections import Counter, OrderedDict
from collections.abc import Callable

# Each watch takes about 10 kB.
MAX_WATCHES = 1024
# A client's own health checks are one watch per connection.
MAX_WATCHES_PER_CONNECTION = 8
MAX_WATCHES_PER_ADDRESS = 128
# Many clients with keys may share a proxy's address.
MAX_WATCHES_PER_KNOWN_ADDRESS = 512
# Only for clients with a key.
NUM_RESERVED = 256
# A client's own health checks carry no key, so the addresses of its requests are remembered.
MAX_KNOWN_ADDRESSES = 4096
# A provider gives an IPv6 client the whole network.
IPV6_NETWORK_BITS = 64


class WatchPlaces:
    def __init__(self, has_key: Callable[[str | None], bool]) -> None:
        """Args: has_key: whether an Authorization header names one of the clients' keys."""
        self._has_key = has_key
        self._by_connection: Counter[str] = Counter()
        self._by_address: Counter[str] = Counter()
        # Addresses that sent a key, the latest last.
        self._known: OrderedDict[str, None] = OrderedDict()
        self.num_taken = 0

    def note_key(self, peer: str) -> None:
        """A request from this peer had a key. Args: peer: as gRPC names it."""
        address = address_of(peer)
        self._known[address] = None
        self._known.move_to_end(address)
        if len(self._known) > MAX_KNOWN_ADDRESSES:
            self._known.popitem(last=False)

    def take(self, peer: str, authorization: str | None) -> str:
        """Returns "" or the reason for a refusal."""
        address = address_of(peer)
        has_key = self._has_key(authorization)
        is_known = has_key or address in self._known
        if self._by_connection[peer] >= MAX_WATCHES_PER_CONNECTION:
            return f"{MAX_WATCHES_PER_CONNECTION} calls of Watch are open on this connection: use Check instead"
        address_limit = MAX_WATCHES_PER_KNOWN_ADDRESS if is_known else MAX_WATCHES_PER_ADDRESS
        if not has_key and self._by_address[address] >= address_limit:
            return (
                f"{address_limit} calls of Watch are open from this address: send a key with further ones, "
                "or use Check instead"
            )
        limit = MAX_WATCHES if is_known else MAX_WATCHES - NUM_RESERVED
        if self.num_taken >= limit:
            return f"{limit} calls of Watch are open: use Check instead"
        self._by_connection[peer] += 1
        self._by_address[address] += 1
        self.num_taken += 1
        return ""

    def free(self, peer: str) -> None:
        self.num_taken -= 1
        for counts, name in ((self._by_connection, peer), (self._by_address, address_of(peer))):
            counts[name] -= 1
            if not counts[name]:
                del counts[name]


@functools.lru_cache(maxsize=4096)
def address_of(peer: str) -> str:
    """Returns a peer's address without its port, of IPv6 the network: "ipv4:10.0.0.1:5000" is "10.0.0.1"."""
    kind, _, rest = urllib.parse.unquote(peer).partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    if kind == "ipv4":
        return host
    address = ipaddress.IPv6Address(host)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, IPV6_NETWORK_BITS), strict=False))
