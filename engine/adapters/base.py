"""LoRA adapters of an engine. Imports no torch."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from tandem.adapters import AdapterRef

# Slot of a sequence without an adapter, and of padding.
NO_ADAPTER = -1


# Kernels hold all rows of a matrix of lower rank at once.
MAX_LORA_RANK = 128


class AdapterError(ValueError):
    """An adapter cannot be used. The message, of one line, says why."""


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """
    Attributes:
        max_loras: adapters on the device at the same time; 0: the engine takes none.
        max_lora_rank: largest rank of an adapter.
        host_bytes: memory of the host cache, which the adapter that loads may exceed.
    """

    max_loras: int
    max_lora_rank: int
    host_bytes: int


class AdapterState(Enum):
    """Place of a known adapter."""

    ON_DISK = "disk"
    LOADING = "loading"
    IN_HOST = "host"
    ON_DEVICE = "device"
    FAILED = "failed"


class Adapters(ABC):
    """Adapters that one engine may compute with, by content hash. The engine thread alone calls all methods.

    A scheduler acquires a sequence's adapter before the sequence's first forward pass, writes the slot to
    TokenSequence.adapter_slot, and releases it once when the sequence ends. Until then the slot keeps the adapter.
    Forward passes that are still running at the release are safe: the next adapter's copy waits for them on the device.

    Attributes:
        on_loaded: called by the loader's thread when a load has ended; wakes the engine thread. It must be quick.
    """

    limits: AdapterLimits
    on_loaded: Callable[[], None]

    @abstractmethod
    def add(self, info: AdapterRef) -> None:
        """Makes an adapter known, without loading it. A known hash takes the new path, and may load again if it
        failed."""

    @abstractmethod
    def remove(self, content_hash: str) -> None:
        """Forgets an adapter: it takes no more uses, and leaves the device and the host when the last use ends. Unknown
        ones are ignored."""

    @abstractmethod
    def prefetch(self, content_hash: str) -> None:
        """Begins to load an adapter into the host cache, ahead of `acquire`. Unknown or failed ones are ignored."""

    @abstractmethod
    def acquire(self, content_hash: str) -> int | None:
        """Pins an adapter that is on the device. Otherwise begins its load, if a slot can be freed; never waits.

        Returns:
            The slot; None as long as the adapter loads, or all slots are pinned. Ask again before the next step.

        Raises:
            AdapterError: the adapter is unknown or could not be loaded.
        """

    @abstractmethod
    def release(self, content_hash: str) -> None:
        """Ends one use. The least recently used adapters without uses lose their slots first."""

    @abstractmethod
    def states(self) -> dict[str, AdapterState]:
        """Returns the place of every known adapter, by content hash."""

    @abstractmethod
    def close(self) -> None:
        """Ends the loader's thread. No forward pass runs."""
