"""Slots by the owners of cache namespaces, and quotas."""

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tandem.pagestore.server.eviction_queue import EvictionQueue


@dataclass(slots=True, eq=False)
class Namespace:
    """An owner of namespaces that has slots.

    Attributes:
        number: stands for the name in the table of slots.
        num_slots: its slots, those of purged pages included.
        queue: order of eviction of its own pages; unused without quotas.
    """

    name: str
    number: int
    queue: EvictionQueue
    num_slots: int = 0


class Namespaces:
    """Counts each namespace's slots.

    Attributes:
        has_quotas: whether a namespace may have less than all slots.
    """

    def __init__(self, num_slots: int, max_share: float) -> None:
        """
        Args:
            max_share: largest part of the slots for one namespace, above 0.
        """
        self._max_slots = max(int(num_slots * max_share), 1)
        self.has_quotas = self._max_slots < num_slots
        self._numbers = array("I", bytes(4 * num_slots))
        # A slot's page is in the queue of its namespace alone.
        self._is_queued = bytearray(num_slots if self.has_quotas else 0)
        self._by_name: dict[str, Namespace] = {}
        self._by_number: list[Namespace] = []
        self._unused_numbers: list[int] = []

    def get(self, name: str) -> Namespace | None:
        return self._by_name.get(name)

    def of(self, slot: int) -> Namespace:
        """Returns the namespace of a slot in use."""
        return self._by_number[self._numbers[slot]]

    def is_full(self, name: str) -> bool:
        """Returns whether a further page of the namespace must take the place of one of its own."""
        namespace = self._by_name.get(name)
        return self.has_quotas and namespace is not None and namespace.num_slots >= self._max_slots

    def add_slot(self, slot: int, name: str) -> None:
        namespace = self._by_name.get(name) or self._add(name)
        namespace.num_slots += 1
        self._numbers[slot] = namespace.number

    def remove_slot(self, slot: int) -> None:
        namespace = self.of(slot)
        namespace.num_slots -= 1
        if not namespace.num_slots:
            self._remove(namespace)

    def is_queued(self, slot: int) -> bool:
        """Returns whether a slot in use has its place in the order of its namespace, if there are quotas."""
        return not self.has_quotas or bool(self._is_queued[slot])

    def purge(self, in_use: Iterable[int]) -> None:
        """Keeps the slots in use, and empties the queues."""
        self._is_queued[:] = bytes(len(self._is_queued))
        for namespace in self._by_name.values():
            namespace.num_slots = 0
            namespace.queue = EvictionQueue(self._is_queued)
        for slot in in_use:
            self.of(slot).num_slots += 1
        for namespace in [each for each in self._by_name.values() if each.num_slots == 0]:
            self._remove(namespace)

    def check_integrity(self, in_use: Iterable[int]) -> str:
        """Recounts the slots; "" or the first violation."""
        counts = Counter(self.of(slot).name for slot in in_use)
        queued = [(slot, each.number) for each in self._by_name.values() for slot in each.queue.slots()]
        if counts != {name: namespace.num_slots for name, namespace in self._by_name.items()}:
            return "slots of namespaces are miscounted"
        if self.has_quotas and max(counts.values(), default=0) > self._max_slots:
            return f"a namespace has {max(counts.values())} slots of at most {self._max_slots}"
        if sorted(queued) != [(slot, self._numbers[slot]) for slot, flag in enumerate(self._is_queued) if flag]:
            return "the queue of a namespace has lost a slot"
        return ""

    def _add(self, name: str) -> Namespace:
        queue = EvictionQueue(self._is_queued)
        if self._unused_numbers:
            namespace = Namespace(name, self._unused_numbers.pop(), queue)
            self._by_number[namespace.number] = namespace
        else:
            namespace = Namespace(name, len(self._by_number), queue)
            self._by_number.append(namespace)
        self._by_name[name] = namespace
        return namespace

    def _remove(self, namespace: Namespace) -> None:
        del self._by_name[namespace.name]
        self._unused_numbers.append(namespace.number)
