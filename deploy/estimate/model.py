"""Reads a model's shape by the name that `tandem serve` takes."""

from pathlib import Path

from tandem.engine.models.config import ModelConfig
from tandem.engine.weights.resolve import resolve_model


def read_model(name: str, quantization: str) -> ModelConfig:
    """Fetches config.json, no weights. Raises ValueError: the model is not found, not fetched or not supported."""
    return ModelConfig.from_dir(Path(resolve_model(name, "dummy"))).quantized(quantization)
