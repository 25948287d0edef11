"""Pages of latents, read only by attention backends. Imports no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.engine.attention.layout import DTYPE_BYTES
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.models.config import ModelConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LatentLayout(PageLayout):
    """Normalized latents, each followed by the rotated part of the keys, for latent attention.

    A pool is page-major: (num_pages, num_layers, page_size, kv_rank + rope_dim).

    Attributes:
        dtype: of pages and of the computation, by torch's name.
    """

    num_layers: int
    page_size: int
    kv_rank: int
    rope_dim: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        for name in ("num_layers", "page_size", "kv_rank", "rope_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @classmethod
    def of(cls, config: ModelConfig, page_size: int, dtype: str, quantized_to: str = "") -> "LatentLayout":
        assert config.latent is not None
        if quantized_to:
            raise ValueError(f"pages of latents cannot be {quantized_to}: use kv_cache_dtype auto for this model")
        return cls(config.num_layers, page_size, config.latent.kv_rank, config.latent.rope_dim, dtype)

    @property
    def token_dim(self) -> int:
        return self.kv_rank + self.rope_dim

    @property
    def page_bytes(self) -> int:
        return self.num_layers * self.page_size * self.token_dim * DTYPE_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        return self.token_dim * DTYPE_BYTES[self.dtype]

    @property
    def tag(self) -> str:
        return f"latent/{self.dtype}/{self.num_layers}x{self.page_size}x{self.kv_rank}+{self.rope_dim}"

    def view(self, memory: "torch.Tensor") -> "torch.Tensor":
        """Views (num_pages, page_bytes) uint8, contiguous, as (num_pages, num_layers, page_size, kv_rank + rope_dim) of
        dtype."""
        import torch

        shape = (len(memory), self.num_layers, self.page_size, self.token_dim)
        return memory.view(getattr(torch, self.dtype)).view(shape)
