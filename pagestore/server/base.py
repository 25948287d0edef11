from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple


class StoredPage(NamedTuple):
    """The names of a page.

    Attributes:
        key: tandem.pagestore.keys.
        parent: key of the page before it; b"" for the first of a prompt.
        identity: 8-byte name for routing.
        namespace: cache namespace, or its owner (namespaces.owner_of), for quotas.
    """

    key: bytes
    parent: bytes
    identity: bytes
    namespace: str


class EndedTransfer(NamedTuple):
    """A page that a slower tier has read into a slot or written from it.

    Attributes:
        ok: False: the transfer failed, and the slot's content is undefined after a read.
    """

    page: StoredPage
    slot: int
    ok: bool


class SlowTier(ABC):
    """A tier below the store's memory: a disk, or the stores of other nodes.

    Called by the store's thread, and never blocks it.

    A slot belongs to the tier from `read` or `write` until the transfer is reported as ended.
    """

    @property
    def is_purging(self) -> bool:
        """Whether the last purge is still being made to last."""
        return False

    @property
    def purge_failure(self) -> str:
        """Why a later life may find pages of before the last purge, once it is no longer purging; "": none can."""
        return ""

    @abstractmethod
    def find(self, key: bytes) -> StoredPage | None:
        """Returns the page if the tier is known to hold it."""

    @abstractmethod
    def read(self, page: StoredPage, slot: int) -> None:
        """Begins to read a page into a slot. A failure ends with ok=False, and the tier then forgets the page."""

    @abstractmethod
    def write(self, page: StoredPage, slot: int) -> bool:
        """Begins to write a page from a slot. Returns False if the tier takes no more at present."""

    @abstractmethod
    def take_ended(self) -> Sequence[EndedTransfer]:
        """Returns transfers that have ended since the last call."""

    @abstractmethod
    def take_changes(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Returns the identities of pages added and removed since the last call."""

    @abstractmethod
    def purge(self) -> None:
        """Forgets all pages, those being written included; reads in flight end with ok=False."""

    @abstractmethod
    def close(self) -> None:
        """Ends all transfers and releases the tier's resources."""


class AskedTier(SlowTier):
    """A tier that learns by asking which pages it holds: `find` returns pages of recent answers."""

    @abstractmethod
    def ask(self, keys: Sequence[bytes]) -> int | None:
        """Begins to look for the run of pages from the first key on, with a deadline.

        Returns:
            A number for `take_answered`; None: there is nobody to ask.
        """

    @abstractmethod
    def cancel(self, question: int) -> None:
        """Forgets a question."""

    @abstractmethod
    def take_answered(self) -> Sequence[int]:
        """Returns the questions answered since the last call. Each that is not cancelled is answered once."""
