import torch


def e4m3_rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Round x as e4m3 pages do: 4 significant bits, steps of 2^-9 near 0, at most 448."""
    x = x / scale
    step = torch.exp2(x.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return ((x / step).round() * step).clamp(-448.0, 448.0) * scale
