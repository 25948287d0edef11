"""Slots of the region and the pages in them."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from tandem.pagestore.server.base import StoredPage


class PageState(Enum):
    """Who changes a slot's content: a worker, a slower tier, nobody."""

    WRITING = "writing"
    READING = "reading"
    READY = "ready"


@dataclass(slots=True, eq=False)
class SlotPage:
    """A page from the grant of its slot until the slot is free again.

    Attributes:
        generation: of the slot; unique among all pages of the slot.
        last_use: tick of the last message that named the page.
        num_pins: finds that read the slot, and writes of a slower tier from it.
        is_listed: whether its key leads to it; False once evicted or purged.
    """

    stored: StoredPage
    slot: int
    generation: int
    state: PageState
    last_use: int
    num_pins: int = 0
    is_listed: bool = True


class SlotTable:
    """Gives each slot one owner at a time."""

    def __init__(self, num_slots: int) -> None:
        self._generations = array("Q", bytes(8 * num_slots))
        self._pages: list[SlotPage | None] = [None] * num_slots
        self._returned: list[int] = []
        # Slots from here on were never used.
        self._num_used = 0

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[SlotPage]:
        return (page for page in self._pages if page is not None)

    @property
    def num_free(self) -> int:
        return len(self._returned) + len(self._pages) - self._num_used

    def page(self, slot: int) -> SlotPage | None:
        return self._pages[slot]

    def take(self, stored: StoredPage, state: PageState, last_use: int) -> SlotPage:
        """Raises IndexError if no slot is free."""
        if self._num_used < len(self._pages):
            slot = self._num_used
            self._num_used += 1
        else:
            slot = self._returned.pop()
        self._generations[slot] += 1
        page = SlotPage(stored, slot, self._generations[slot], state, last_use)
        self._pages[slot] = page
        return page

    def give_back(self, page: SlotPage) -> None:
        self._pages[page.slot] = None
        self._returned.append(page.slot)

    def check_integrity(self) -> str:
        free = set(self._returned) | set(range(self._num_used, len(self._pages)))
        if len(free) != self.num_free:
            return f"{self.num_free} slots are free, but only {len(free)} different ones"
        for slot, page in enumerate(self._pages):
            if (page is None) != (slot in free):
                return f"slot {slot} is {'lost' if page is None else 'free and used'}"
            if page is not None and (page.slot, page.generation) != (slot, self._generations[slot]):
                return f"slot {slot} has the page of slot {page.slot}, generation {page.generation}"
        return ""
