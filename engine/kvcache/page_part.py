"""Location of KV heads within a page. Imports no torch."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from tandem.engine.kvcache.base import PageLayout
from tandem.head_slice import HeadSlice


@dataclass(frozen=True, slots=True)
class PagePart:
    """Equal pieces at equal distances in a page, one for each token's keys or values in a layer.

    Attributes:
        offset: start of the first piece, in bytes.
        stride: distance between the starts of two pieces, in bytes.
        piece_bytes: length of a piece.
    """

    num_pieces: int
    offset: int
    stride: int
    piece_bytes: int

    @classmethod
    def whole(cls, page_bytes: int) -> Self:
        return cls(1, 0, page_bytes, page_bytes)

    @classmethod
    def of(cls, layout: PageLayout, page: HeadSlice, heads: HeadSlice) -> Self:
        """
        Args:
            layout: of any rank of the model.
            page: all heads in the page.
            heads: those of the part.
        """
        num_pieces = layout.page_bytes // (layout.heads.num * layout.head_bytes)
        offset = (heads.first - page.first) * layout.head_bytes
        return cls(num_pieces, offset, page.num * layout.head_bytes, heads.num * layout.head_bytes)

    @property
    def num_bytes(self) -> int:
        return self.num_pieces * self.piece_bytes

    @property
    def page_bytes(self) -> int:
        return self.num_pieces * self.stride

    @property
    def is_whole(self) -> bool:
        return self.piece_bytes == self.stride

    def packed(self) -> "PagePart":
        """Returns the same pieces side by side, in a page of their own."""
        return PagePart(self.num_pieces, 0, self.piece_bytes, self.piece_bytes)

    def view(self, pages: np.ndarray) -> np.ndarray:
        """Views pages, (num_pages, page_bytes) uint8 and contiguous, as (num_pages, num_pieces, piece_bytes)."""
        by_piece = pages.reshape(len(pages), self.num_pieces, self.stride)
        return by_piece[:, :, self.offset : self.offset + self.piece_bytes]
