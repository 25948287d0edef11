from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol, Self

from tandem.head_slice import HeadSlice

if TYPE_CHECKING:
    from tandem.engine.models.config import ModelConfig


class PageLayout(ABC):
    """Page format for components that treat pages as opaque bytes.

    Only attention backends know a concrete class.
    """

    page_size: int

    @classmethod
    @abstractmethod
    def of(cls, config: "ModelConfig", page_size: int, dtype: str, quantized_to: str = "") -> Self:
        """
        Args:
            dtype: compute dtype, by torch's name.
            quantized_to: narrower page dtype; "": the compute dtype.

        Raises:
            ValueError: pages cannot have this size or dtype.
        """

    @property
    @abstractmethod
    def page_bytes(self) -> int:
        """Bytes of a page, all layers together."""

    @property
    @abstractmethod
    def tag(self) -> str:
        """A readable text, equal exactly if two pools' pages have the same format."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys, values or latent in a layer. A page consists of rows, and begins at a multiple of
        a row."""
        return self.page_bytes

    @property
    def heads(self) -> HeadSlice:
        """The model's KV heads in these pages. Pages that every rank holds whole have one."""
        return HeadSlice(0, 1, 1)

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in a piece. A page consists of pieces that have all its heads side by side."""
        return self.page_bytes

    def shard(self, rank: int, degree: int) -> Self:
        """Returns the pages of one of `degree` ranks. Raises ValueError if they cannot share the heads."""
        return self

    @property
    def whole(self) -> Self:
        """Pages with all heads of the model."""
        return self.shard(0, 1)

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


class Completion(Protocol):
    """A running forward pass or copy that uses page ids."""

    def done(self) -> bool:
        """Return whether the operation has ended, without blocking. Once True, always True.

        Raises:
            RuntimeError: the device is lost. The pages are never freed, so the process must end.
        """
        ...
