"""Choice of a model's page layout. Imports no torch."""

from tandem.choices import Choices
from tandem.engine.config import KV_CACHE_DTYPES
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.families.table import ARCHITECTURES

_LAYOUTS: Choices[PageLayout] = Choices(
    "tandem.engine.kvcache.base:PageLayout",
    {name: architecture.page_layout for name, architecture in ARCHITECTURES.items()},
)


def page_layout_of(config: ModelConfig, page_size: int, dtype: str, kv_cache_dtype: str) -> PageLayout:
    """
    Args:
        dtype: torch's name of the engine's dtype.
        kv_cache_dtype: one of KV_CACHE_DTYPES.

    Raises:
        ValueError: pages cannot have this size or dtype.
    """
    return _LAYOUTS.load(config.architecture).of(config, page_size, dtype, KV_CACHE_DTYPES[kv_cache_dtype])
