from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class RunningFind:
    """A find from its message to EndFind.

    Attributes:
        session: name of its session.
        end: index in `keys` behind the last page that is answered or expected.
        next: index of the next page to answer.
        ahead: index of the next page to read or to wait for.
        slots: of the answered pages, each pinned once.
        arrived: slots of pages between `next` and `ahead`, pinned once, with the tier that held them.
        coming: slots of pages between `next` and `ahead` that are being read.
        deadline: time by which the next page must arrive.
        for_peer: for the store of another node, which gets no other node's pages from here.
        question: number of the question about the pages from `end` on; None: nobody is asked.
    """

    session: str
    number: int
    keys: tuple[bytes, ...]
    end: int
    next: int = 0
    ahead: int = 0
    slots: list[int] = field(default_factory=list)
    arrived: dict[int, tuple[int, int]] = field(default_factory=dict)
    coming: dict[int, int] = field(default_factory=dict)
    deadline: float = 0.0
    for_peer: bool = False
    question: int | None = None

    @property
    def is_waiting(self) -> bool:
        return self.next < self.end or self.question is not None
