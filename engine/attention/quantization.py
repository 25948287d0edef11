"""Quantized pages in plain torch. Kernels of GPUs do the same in registers."""

import torch

from tandem.engine.attention.layout import KvHeadLayout


class Quantizer:
    """Numbers to and from the bytes of one layer's keys, or of its values.

    A number is divided by the scale and rounded to the nearest of the narrower dtype, ties to even; what is beyond its
    largest becomes that, infinity too. NaN stays NaN.
    """

    def __init__(self, layout: KvHeadLayout, scale: float, device: torch.device) -> None:
        """Args: layout: of quantized pages."""
        self._dtype: torch.dtype = getattr(torch, layout.quantized_to)
        self._limit = torch.finfo(self._dtype).max
        self._inverse = 1.0 / scale
        # What each byte stands for: looking it up is quicker on a CPU than computing it.
        every_byte = torch.arange(256, dtype=torch.uint8, device=device).view(self._dtype)
        self._numbers = (every_byte.float() * scale).to(getattr(torch, layout.dtype))  # (256,)

    def quantized(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns uint8 of the same shape."""
        scaled = (numbers.float() * self._inverse).clamp(-self._limit, self._limit)
        return scaled.to(self._dtype).view(torch.uint8)

    def numbers(self, quantized: torch.Tensor) -> torch.Tensor:
        """What such bytes stand for, in the layout's dtype."""
        return self._numbers.index_select(0, quantized.flatten().int()).view(quantized.shape)
