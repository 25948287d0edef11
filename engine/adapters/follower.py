"""Adapters of a follower, which loads in the leader's order."""

import os
import struct
from collections import OrderedDict
from typing import NamedTuple

from tandem.adapters import AdapterRef
from tandem.engine.adapters.host import HostAdapter
from tandem.engine.adapters.loader import AdapterLoader, Load
from tandem.engine.adapters.slots import AdapterSlots
from tandem.engine.models.config import ModelConfig

# A forward pass has another number in its place.
_MARK = 0
_HEADER = struct.Struct("<qqi32s")


class LoadOrder(NamedTuple):
    """The leader's order to load an adapter into a slot, behind the forward passes before it.

    Attributes:
        number: of the order, from 1 without gaps.
    """

    number: int
    slot: int
    content_hash: str
    path: str

    def encode(self) -> bytes:
        return _HEADER.pack(_MARK, self.number, self.slot, self.content_hash.encode()) + os.fsencode(self.path)

    @classmethod
    def decode(cls, message: bytes) -> "LoadOrder | None":
        """Returns None for another message."""
        if int.from_bytes(message[:8], "little") != _MARK:
            return None
        _, number, slot, content_hash = _HEADER.unpack_from(message)
        return cls(number, slot, content_hash.decode(), os.fsdecode(message[_HEADER.size :]))


class FollowerAdapters:
    """Belongs to the thread of the follower's loop."""

    def __init__(self, slots: AdapterSlots, model: ModelConfig, host_bytes: int) -> None:
        """Args: host_bytes: of adapters that are kept in host memory."""
        self._slots = slots
        self._host_bytes = host_bytes
        self._hosts: OrderedDict[str, HostAdapter] = OrderedDict()
        self._loader = AdapterLoader(slots, model, lambda: None)

    def load(self, order: LoadOrder) -> None:
        """Begins to load. Launched forward passes may still use the slot's earlier adapter."""
        info = AdapterRef(order.content_hash, order.path, 0, (), 0)
        host = self._hosts.get(order.content_hash)
        self._loader.submit(Load(order.number, info, order.slot, host, self._slots.fence()))

    def ended(self) -> list[tuple[int, bool]]:
        """Returns the numbers of the orders that have ended since the last call, and whether they failed."""
        if not (ended := self._loader.take()):
            return []
        for loaded in ended:
            if loaded.host is not None:
                self._hosts[loaded.load.info.content_hash] = loaded.host
                self._hosts.move_to_end(loaded.load.info.content_hash)
        while sum(host.num_bytes for host in self._hosts.values()) > self._host_bytes:
            self._hosts.popitem(last=False)
        return [(loaded.load.number, bool(loaded.error)) for loaded in ended]

    def close(self) -> None:
        self._loader.close()
