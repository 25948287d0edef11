"""Contents of a page, read only by attention backends. Imports no torch."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tandem.engine.kvcache.base import PageLayout
from tandem.engine.models.config import ModelConfig
from tandem.head_slice import HeadSlice

if TYPE_CHECKING:
    import torch

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZED_BYTES = {"float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True)
class KvHeadLayout(PageLayout):
    """Keys and values by head, for multi-head, grouped-query or multi-query attention.

    A pool is page-major: (num_pages, num_layers, 2, page_size, num_kv_heads, head_dim), keys before values. A page is
    contiguous, so a transfer needs no gather per layer.

    Attributes:
        num_kv_heads: heads in these pages.
        dtype: compute dtype, by torch's name.
        quantized_to: narrower page dtype, with a scale per layer (KvScales); "": `dtype`.
        first_head, total_heads: place of a rank's heads among the model's; total_heads 0: these are all.
    """

    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    quantized_to: str = ""
    first_head: int = 0
    total_heads: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if self.quantized_to and self.quantized_to not in QUANTIZED_BYTES:
            raise ValueError(f"quantized_to {self.quantized_to!r} is not one of {', '.join(QUANTIZED_BYTES)}")
        for name in ("num_layers", "page_size", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @classmethod
    def of(cls, config: ModelConfig, page_size: int, dtype: str, quantized_to: str = "") -> "KvHeadLayout":
        assert config.latent is None
        return cls(config.num_layers, page_size, config.num_kv_heads, config.head_dim, dtype, quantized_to)

    @property
    def page_dtype(self) -> str:
        return self.quantized_to or self.dtype

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def page_bytes(self) -> int:
        return self.num_layers * 2 * self.page_size * self.num_kv_heads * self.head_bytes

    @property
    def row_bytes(self) -> int:
        return self.num_kv_heads * self.head_bytes

    @property
    def tag(self) -> str:
        heads = self.heads
        rank = f"/{heads.first}-{heads.end - 1} of {heads.total}" if heads.num != heads.total else ""
        return f"kv-by-head/{self.page_dtype}/{'x'.join(map(str, self.page_shape))}{rank}"

    @property
    def heads(self) -> HeadSlice:
        return HeadSlice(self.first_head, self.num_kv_heads, self.total_heads or self.num_kv_heads)

    @property
    def head_bytes(self) -> int:
        return self.head_dim * (DTYPE_BYTES | QUANTIZED_BYTES)[self.page_dtype]

    def shard(self, rank: int, degree: int) -> "KvHeadLayout":
        heads = HeadSlice.of(self.heads.total, rank, degree)
        total_heads = heads.total if heads.num != heads.total else 0
        return replace(self, num_kv_heads=heads.num, first_head=heads.first, total_heads=total_heads)

    def view(self, memory: "torch.Tensor") -> "torch.Tensor":
        """Views (num_pages, page_bytes) uint8, contiguous, as (num_pages, *page_shape) of page_dtype."""
        import torch

        return memory.view(getattr(torch, self.page_dtype)).view(len(memory), *self.page_shape)
