"""Prefixes that a worker reports as cached."""

from tandem.messages import CachedPrefixes
from tandem.prefix import unpack_identities
from tandem.router.workers.prefix_report import PrefixReport


class WorkerPrefixes(PrefixReport):
    """Cached prefixes of one life of a worker. With a prefix it has all shorter ones, except while the worker repeats
    its whole report.

    Attributes:
        identities: identities of prefixes that end with a page (tandem.prefix).
    """

    __slots__ = ("identities",)

    def __init__(self) -> None:
        super().__init__()
        self.identities: set[int] = set()

    def clear(self) -> None:
        self.identities = set()

    def _apply(self, message: CachedPrefixes) -> None:
        self.identities.difference_update(unpack_identities(message.removed))
        self.identities.update(unpack_identities(message.stored))
