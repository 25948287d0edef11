"""Copies that end at the test's command, of pools and regions that hold names instead of bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.pagestore.client.base import RegionCopies


@dataclass(eq=False)
class ScriptedCopy:
    sources: list[int]
    destinations: list[int]
    source: dict[int, object]
    destination: dict[int, object]
    seconds: float
    is_done: bool = False

    def end(self) -> None:
        """Moves the contents of that moment: a source that was reused too early is seen."""
        for source, destination in zip(self.sources, self.destinations, strict=True):
            self.destination[destination] = self.source.get(source)
        self.is_done = True

    def done(self) -> bool:
        return self.is_done


class ScriptedCopies(RegionCopies):
    """
    Attributes:
        pool, region: contents by page and by slot.
        outs, ins: all copies, in order.
        page_s: measured time of a page's copy.
    """

    def __init__(self) -> None:
        self.pool: dict[int, object] = {}
        self.region: dict[int, object] = {}
        self.page_s = 0.0
        self.outs: list[ScriptedCopy] = []
        self.ins: list[ScriptedCopy] = []

    def copy_out(self, page_ids: Sequence[int], slots: Sequence[int]) -> ScriptedCopy:
        self.outs.append(ScriptedCopy([*page_ids], [*slots], self.pool, self.region, len(slots) * self.page_s))
        return self.outs[-1]

    def copy_in(self, slots: Sequence[int], page_ids: Sequence[int]) -> ScriptedCopy:
        self.ins.append(ScriptedCopy([*slots], [*page_ids], self.region, self.pool, len(slots) * self.page_s))
        return self.ins[-1]

    def end_all(self) -> None:
        for copy in [*self.outs, *self.ins]:
            if not copy.is_done:
                copy.end()

    def close(self) -> None:
        self.end_all()
