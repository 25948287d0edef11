import torch

from tandem.engine.attention.latent_layout import LatentLayout
from tandem.engine.attention.layout import KvHeadLayout


class Quantizer:
    """Converts one layer's keys, values or latents to and from page bytes.

    Divides by the scale, rounds to the nearest, ties to even, and saturates; NaN stays NaN.
    """

    def __init__(self, layout: KvHeadLayout | LatentLayout, scale: float, device: torch.device) -> None:
        self._dtype: torch.dtype = getattr(torch, layout.quantized_to)
        self._limit = torch.finfo(self._dtype).max
        self._inverse = 1.0 / scale
        # Lookup is faster on a CPU than conversion.
        every_byte = torch.arange(256, dtype=torch.uint8, device=device).view(self._dtype)
        self._numbers = (every_byte.float() * scale).to(getattr(torch, layout.dtype))  # (256,)

    def quantized(self, numbers: torch.Tensor) -> torch.Tensor:
        scaled = (numbers.float() * self._inverse).clamp(-self._limit, self._limit)
        return scaled.to(self._dtype).view(torch.uint8)

    def numbers(self, quantized: torch.Tensor) -> torch.Tensor:
        return self._numbers.index_select(0, quantized.flatten().int()).view(quantized.shape)
