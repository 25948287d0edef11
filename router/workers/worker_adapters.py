"""Adapters that a worker has, and the time until it has another one."""

from tandem.adapters import AdapterRef
from tandem.messages import AdapterPlaces

# Before the first measurement, and from host memory to the device, in seconds per byte.
DISK_BYTE_S = 1e-9
DEVICE_BYTE_S = 1e-10
# Of any load, in seconds.
FIXED_S = 0.005
# Time for which a load counts as under way, in seconds.
UNDER_WAY_S = 60.0


class WorkerAdapters:
    __slots__ = ("_expected", "_load_byte_s", "in_host", "on_device")

    def __init__(self) -> None:
        self.on_device: frozenset[str] = frozenset()
        self.in_host: frozenset[str] = frozenset()
        self._load_byte_s = DISK_BYTE_S
        # Adapters of placed requests that no report named yet, with the time of the first.
        self._expected: dict[str, float] = {}

    def receive(self, places: AdapterPlaces) -> None:
        self.on_device, self.in_host = frozenset(places.on_device), frozenset(places.in_host)
        self._load_byte_s = places.load_byte_s or DISK_BYTE_S
        for content_hash in self.on_device | self.in_host:
            self._expected.pop(content_hash, None)

    def expect(self, adapter: AdapterRef, now: float) -> None:
        """Notes that a request was placed, whose adapter the worker loads if it lacks it."""
        if adapter.content_hash not in self.on_device and adapter.content_hash not in self.in_host:
            self._expected.setdefault(adapter.content_hash, now)
        for content_hash in [name for name, since in self._expected.items() if now > since + UNDER_WAY_S]:
            del self._expected[content_hash]

    def wait_s(self, adapter: AdapterRef | None) -> float:
        """Returns the seconds until a request with the adapter may start, by the adapter alone."""
        if adapter is None or adapter.content_hash in self.on_device:
            return 0.0
        if adapter.content_hash in self.in_host:
            return FIXED_S + adapter.num_bytes * DEVICE_BYTE_S
        load_s = FIXED_S + adapter.num_bytes * (self._load_byte_s + DEVICE_BYTE_S)
        # Half of a load that is under way is left, on average.
        return 0.5 * load_s if adapter.content_hash in self._expected else load_s
