import logging

import torch

from tandem.engine.attention.base import AttentionBackend
from tandem.engine.attention.table import ATTENTION_BACKENDS, AUTO
from tandem.engine.config import EngineConfig
from tandem.engine.kvcache.base import PageLayout

logger = logging.getLogger(__name__)


def choose_backend(
    config: EngineConfig, layout: PageLayout, num_q_heads: int, device: torch.device
) -> type[AttentionBackend]:
    """Returns the configured backend; for `auto`, the first in the table that supports the model on this device.

    Raises:
        ValueError: no backend can be imported and supports the model.
    """
    if config.attention_backend != AUTO:
        backend = ATTENTION_BACKENDS.load(config.attention_backend)
        if reason := backend.why_not(layout, num_q_heads, device):
            raise ValueError(reason)
        return backend
    # A backend for other pages is no faster choice that this model misses.
    reasons: list[str] = []
    of_others: list[str] = []
    for name in ATTENTION_BACKENDS.for_device(device.type):
        backend = ATTENTION_BACKENDS.load(name)
        reason = backend.why_not(layout, num_q_heads, device)
        if not reason:
            # No backend has fast float32 kernels.
            if reasons and config.dtype != "float32":
                logger.warning("%s: using the slower %s backend", reasons[0], name)
            return backend
        (reasons if isinstance(layout, backend.layout) else of_others).append(reason)
    raise ValueError(f"no attention backend computes this model: {'; '.join(reasons or of_others)}")
