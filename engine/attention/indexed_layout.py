"""Pages of latents and index keys, read only by attention backends. Imports no torch."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.engine.attention.latent_layout import LatentLayout
from tandem.engine.attention.layout import DTYPE_BYTES
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.models.config import ModelConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class IndexedLayout(PageLayout):
    """Latents, and the keys by which each query chooses among them.

    A page has two regions: latents as in LatentLayout, (num_layers, page_size, kv_rank + rope_dim), then index keys,
    (num_layers, page_size, index_dim).

    Attributes:
        index_dim: size of an index key.
        dtype: of pages and of the computation, by torch's name.
    """

    num_layers: int
    page_size: int
    kv_rank: int
    rope_dim: int
    index_dim: int
    dtype: str

    def __post_init__(self) -> None:
        if self.index_dim < 1:
            raise ValueError(f"index_dim must be at least 1, not {self.index_dim}")
        # Checks the others.
        assert self.latents

    @classmethod
    def of(cls, config: ModelConfig, page_size: int, dtype: str, quantized_to: str = "") -> "IndexedLayout":
        assert config.indexer is not None
        if quantized_to:
            raise ValueError(
                f"pages of latents with index keys cannot be {quantized_to}: use kv_cache_dtype auto for this model"
            )
        latents = LatentLayout.of(config, page_size, dtype)
        return cls(latents.num_layers, page_size, latents.kv_rank, latents.rope_dim, config.indexer.head_dim, dtype)

    @property
    def latents(self) -> LatentLayout:
        """Layout of the first region."""
        return LatentLayout(self.num_layers, self.page_size, self.kv_rank, self.rope_dim, self.dtype)

    @property
    def page_bytes(self) -> int:
        index_keys = self.num_layers * self.page_size * self.index_dim
        return self.latents.page_bytes + index_keys * DTYPE_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        return math.lcm(self.latents.row_bytes, self.index_dim * DTYPE_BYTES[self.dtype])

    @property
    def tag(self) -> str:
        return f"indexed-{self.latents.tag}+{self.index_dim}"

    def views(self, memory: "torch.Tensor") -> tuple["torch.Tensor", "torch.Tensor"]:
        """Views (num_pages, page_bytes) uint8, contiguous, as latents and index keys of dtype.

        Returns:
            (num_pages, num_layers, page_size, kv_rank + rope_dim) and (num_pages, num_layers, page_size, index_dim).
        """
        import torch

        num_latents = self.latents.page_bytes // DTYPE_BYTES[self.dtype]
        pages = memory.view(getattr(torch, self.dtype))
        shape = self.num_layers, self.page_size
        return (
            pages[:, :num_latents].unflatten(1, (*shape, self.latents.token_dim)),
            pages[:, num_latents:].unflatten(1, (*shape, self.index_dim)),
        )
