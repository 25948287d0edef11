"""Recovers Llama 3's scaling of rotary frequencies from its factors in a GGUF file."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tandem.engine.weights.gguf.tensors import ROPE_FACTORS, Tensors, dequantized


def rope_scaling(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any] | None:
    """Returns rope_scaling of config.json; None without scaling. The file has one factor per rotary frequency.

    Raises:
        ValueError: the factors are not Llama 3's.
    """
    if ROPE_FACTORS not in tensors:
        return None
    factors = dequantized(tensors[ROPE_FACTORS]).astype(np.float64)
    head_dim, factor = config["head_dim"], float(factors.max())
    # The file lacks these parameters, which all Llama 3 releases share.
    low, high, original = 1.0, 4.0, 8192
    wavelengths = 2 * np.pi * config["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ValueError(f"{ROPE_FACTORS} holds a rope scaling that is not Llama 3's: not supported")
    if factor == 1.0:
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
