"""The page table of a request."""

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    _Ids = array[int]
else:
    _Ids = array

NO_COPY = -1


class PageTable(_Ids):
    """Page ids, 32 bits each. Pages are appended; replace one with `replace` alone.

    Attributes:
        copy_id: number of the followers' copy; NO_COPY without a valid one. The copy may be shorter.
    """

    __slots__ = ("_outdated", "copy_id")

    copy_id: int
    _outdated: list[int]

    def __new__(cls, page_ids: Iterable[int]) -> Self:
        return super().__new__(cls, "i", page_ids)  # type: ignore[return-value]

    def __init__(self, page_ids: Iterable[int]) -> None:
        self.copy_id = NO_COPY

    def replace(self, index: int, page_id: int) -> None:
        self[index] = page_id
        if self.copy_id != NO_COPY:
            self._outdated.append(self.copy_id)
            self.copy_id = NO_COPY

    def set_copy(self, copy_id: int, outdated: list[int]) -> None:
        """Args: outdated: gets copy_id when a page is replaced."""
        self.copy_id = copy_id
        self._outdated = outdated
