"""Which layout the pages of a model have. This is the one place that decides it; planner and engine both ask here, and
importing it costs no torch."""

from tandem.choices import Choices
from tandem.engine.config import KV_CACHE_DTYPES
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.models.architectures import ARCHITECTURES
from tandem.engine.models.config import ModelConfig

_LAYOUTS: Choices[PageLayout] = Choices(
    "tandem.engine.kvcache.base:PageLayout",
    {name: architecture.page_layout for name, architecture in ARCHITECTURES.items()},
)


def page_layout_of(config: ModelConfig, page_size: int, dtype: str, kv_cache_dtype: str) -> PageLayout:
    """Returns the layout that the pages of a model have.

    Args:
        page_size: tokens of a page.
        dtype: what the engine computes in, by torch's name.
        kv_cache_dtype: one of KV_CACHE_DTYPES.

    Raises:
        ValueError: pages cannot have this size or dtype.
    """
    return _LAYOUTS.load(config.architecture).of(config, page_size, dtype, KV_CACHE_DTYPES[kv_cache_dtype])
