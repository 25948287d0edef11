from dataclasses import dataclass, field

from tandem.pagestore.server.slots import SlotPage


@dataclass(slots=True, eq=False)
class RunningFind:
    """A find from its message to EndFind.

    Attributes:
        session: name of its session.
        end: index in `keys` behind the last page that is answered or expected.
        next: index of the next page to answer.
        ahead: index of the next page to read or to wait for.
        pages: answered pages, each pinned once.
        arrived: pages between `next` and `ahead`, pinned once, with the tier that held them.
        coming: pages between `next` and `ahead` that are being read.
        deadline: time by which the next page must arrive.
    """

    session: str
    number: int
    keys: tuple[bytes, ...]
    end: int
    next: int = 0
    ahead: int = 0
    pages: list[SlotPage] = field(default_factory=list)
    arrived: dict[int, tuple[SlotPage, int]] = field(default_factory=dict)
    coming: dict[int, SlotPage] = field(default_factory=dict)
    deadline: float = 0.0

    @property
    def is_waiting(self) -> bool:
        return self.next < self.end
