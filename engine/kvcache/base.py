"""What everybody who handles pages may know of them: how large one is, and whether two pools' pages mean the same."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from tandem.engine.models.config import ModelConfig


class PageLayout(ABC):
    """What a page is, for all who allocate, cache or ship pages without looking into them.

    Only attention backends know a layout by its own class, and so what stands where in a page
    (engine/attention/layout.py). `tandem.engine.page_layout.page_layout_of` says which one a model has.

    Attributes:
        page_size: tokens of a page.
    """

    page_size: int

    @classmethod
    @abstractmethod
    def of(cls, config: "ModelConfig", page_size: int, dtype: str, quantized_to: str = "") -> Self:
        """The layout for a model's shape.

        Args:
            dtype: what the engine computes in, by torch's name.
            quantized_to: the narrower dtype that pages are to have; "": that in which the engine computes.

        Raises:
            ValueError: pages cannot have this size or dtype.
        """

    @property
    @abstractmethod
    def page_bytes(self) -> int:
        """Bytes of a page, of all layers together."""

    @property
    @abstractmethod
    def tag(self) -> str:
        """A short readable text that is equal exactly where the pages of two pools mean the same, byte by byte. Two
        workers compare it before one ships pages to the other."""

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)


class Completion(Protocol):
    """Something under way that has page numbers in hand: a forward, a copy that reads pages, one that writes them."""

    def done(self) -> bool:
        """Whether it is over. Once True, always True; never blocks.

        Raises:
            RuntimeError: nobody can say any more, because the device is lost. The page numbers stay in hand for ever,
                so the process has to end.
        """
        ...
