"""Pages with opaque contents."""

from dataclasses import dataclass

from tandem.engine.kvcache.base import PageLayout
from tandem.engine.models.config import ModelConfig


@dataclass(frozen=True)
class OpaqueLayout(PageLayout):
    page_size: int
    num_bytes: int

    @classmethod
    def of(cls, config: ModelConfig, page_size: int, dtype: str, quantized_to: str = "") -> "OpaqueLayout":
        raise AssertionError("no model has such pages")

    @property
    def page_bytes(self) -> int:
        return self.num_bytes

    @property
    def tag(self) -> str:
        return f"opaque/{self.page_size}x{self.num_bytes}"
