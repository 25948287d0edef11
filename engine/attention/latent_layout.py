"""Pages of latents, read only by attention backends. Imports no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tandem.engine.attention.layout import DTYPE_BYTES, QUANTIZED_BYTES
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.models.config import ModelConfig

if TYPE_CHECKING:
    import torch


class LatentPages(NamedTuple):
    """A pool's numbers. Both views have the pool's rows, so neither is contiguous.

    Attributes:
        latents: (num_pages, num_layers, page_size, kv_rank) of the page dtype.
        keys: (num_pages, num_layers, page_size, rope_dim) of the compute dtype: their rotated part.
    """

    latents: "torch.Tensor"
    keys: "torch.Tensor"


@dataclass(frozen=True, slots=True)
class LatentLayout(PageLayout):
    """Normalized latents, each followed by the rotated part of the keys, for latent attention.

    A pool is page-major: (num_pages, num_layers, page_size, row_bytes). Only latents are quantized: positions are more
    sensitive to rounding, and are an eighth of the numbers.

    Attributes:
        dtype: compute dtype, by torch's name.
        quantized_to: narrower dtype of latents, with a scale per layer (KvScales.keys); "": `dtype`.
    """

    num_layers: int
    page_size: int
    kv_rank: int
    rope_dim: int
    dtype: str
    quantized_to: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if self.quantized_to and self.quantized_to not in QUANTIZED_BYTES:
            raise ValueError(f"quantized_to {self.quantized_to!r} is not one of {', '.join(QUANTIZED_BYTES)}")
        for name in ("num_layers", "page_size", "kv_rank", "rope_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.latent_bytes % DTYPE_BYTES[self.dtype]:
            # Else the keys behind a latent have no address of their dtype.
            raise ValueError(f"latents of {self.kv_rank} numbers cannot be {self.quantized_to} beside {self.dtype}")

    @classmethod
    def of(cls, config: ModelConfig, page_size: int, dtype: str, quantized_to: str = "") -> "LatentLayout":
        assert config.latent is not None
        latent = config.latent
        return cls(config.num_layers, page_size, latent.kv_rank, latent.rope_dim, dtype, quantized_to)

    @property
    def page_dtype(self) -> str:
        """Of latents, by torch's name."""
        return self.quantized_to or self.dtype

    @property
    def token_dim(self) -> int:
        return self.kv_rank + self.rope_dim

    @property
    def latent_bytes(self) -> int:
        return self.kv_rank * (DTYPE_BYTES | QUANTIZED_BYTES)[self.page_dtype]

    @property
    def page_bytes(self) -> int:
        return self.num_layers * self.page_size * self.row_bytes

    @property
    def row_bytes(self) -> int:
        return self.latent_bytes + self.rope_dim * DTYPE_BYTES[self.dtype]

    @property
    def tag(self) -> str:
        dtypes = f"{self.quantized_to}+{self.dtype}" if self.quantized_to else self.dtype
        return f"latent/{dtypes}/{self.num_layers}x{self.page_size}x{self.kv_rank}+{self.rope_dim}"

    def views(self, memory: "torch.Tensor") -> LatentPages:
        """Args: memory: (num_pages, page_bytes) uint8, each page contiguous."""
        import torch

        rows = memory.unflatten(1, (self.num_layers, self.page_size, self.row_bytes))
        latents, keys = rows.tensor_split((self.latent_bytes,), dim=-1)
        return LatentPages(latents.view(getattr(torch, self.page_dtype)), keys.view(getattr(torch, self.dtype)))
