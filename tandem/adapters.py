"""LoRA adapters by name, equal in routers and workers.

A name stands for the content that it was last loaded with. Every process that knows names keeps a book of entries.
Books merge: of two entries for one name, the later one wins. So all books agree once they have exchanged their entries.
"""

from collections.abc import Iterable
from dataclasses import dataclass

# Entries of unloaded names that a book keeps: a process that was away must not bring the name back.
MAX_UNLOADED = 1024
MAX_NAME_LEN = 256
# Names that may be loaded together: processes exchange all of them in one message.
MAX_LOADED = 4096


def check_adapter_name(name: str) -> None:
    """Raises ValueError: an adapter cannot have this name."""
    if not 0 < len(name) <= MAX_NAME_LEN or not name.isprintable():
        raise ValueError(f"an adapter's name must be 1 to {MAX_NAME_LEN} printable characters")


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One adapter's content and its place.

    Attributes:
        content_hash: hex digest of all tensors and scales, 32 digits. Two directories have the same hash exactly if
            they compute the same.
        path: its PEFT directory.
        rank: largest rank of its modules.
        targets: last parts of the adapted modules' names ("q_proj"), sorted.
        num_bytes: size of its tensors in the checkpoint.
        base_model: base_model_name_or_path of its configuration, for people; may be empty.
    """

    content_hash: str
    path: str
    rank: int
    targets: tuple[str, ...]
    num_bytes: int
    base_model: str = ""


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """A name's load or unload.

    Attributes:
        version, origin: the later pair wins. The version is a time in nanoseconds, the origin names the router.
        adapter: None: the name was unloaded.
    """

    name: str
    version: int
    origin: str
    adapter: AdapterRef | None = None


class AdapterBook:
    """Entries by name."""

    def __init__(self) -> None:
        self._entries: dict[str, AdapterEntry] = {}

    def find(self, name: str) -> AdapterRef | None:
        entry = self._entries.get(name)
        return entry.adapter if entry is not None else None

    def loaded(self) -> list[AdapterEntry]:
        """Returns the entries with an adapter, by name."""
        return sorted((entry for entry in self._entries.values() if entry.adapter is not None), key=lambda e: e.name)

    def entries(self) -> tuple[AdapterEntry, ...]:
        """Returns all entries, also of unloaded names."""
        return tuple(self._entries.values())

    def content_hashes(self) -> frozenset[str]:
        return frozenset(entry.adapter.content_hash for entry in self.loaded() if entry.adapter is not None)

    def merge(self, entries: Iterable[AdapterEntry]) -> list[AdapterEntry]:
        """Takes later entries. Returns those that were news."""
        news = []
        for entry in entries:
            known = self._entries.get(entry.name)
            if known is None or (entry.version, entry.origin) > (known.version, known.origin):
                self._entries[entry.name] = entry
                news.append(entry)
        if news:
            self._drop_oldest_unloaded()
        return news

    def change(self, name: str, adapter: AdapterRef | None, origin: str, now_ns: int) -> AdapterEntry:
        """Enters a load, or an unload, that is later than all known entries."""
        version = max([now_ns, *(entry.version + 1 for entry in self._entries.values())])
        entry = AdapterEntry(name, version, origin, adapter)
        self.merge([entry])
        return entry

    def _drop_oldest_unloaded(self) -> None:
        unloaded = [entry for entry in self._entries.values() if entry.adapter is None]
        unloaded.sort(key=lambda entry: entry.version)
        for entry in unloaded[: max(0, len(unloaded) - MAX_UNLOADED)]:
            del self._entries[entry.name]
