"""The shape of a model by the name that `tandem serve` takes."""

from pathlib import Path

from tandem.engine.models.config import ModelConfig
from tandem.engine.weights.resolve import resolve_model


def read_model(name: str, quantization: str) -> ModelConfig:
    """Reads its config.json. A hub model comes from the local hub cache, and from the network only if it is not there;
    weights are not fetched.

    Args:
        quantization: as in EngineConfig.

    Raises:
        ValueError: the model cannot be found or fetched, or is of a kind that is not supported.
    """
    return ModelConfig.from_dir(Path(resolve_model(name, "dummy"))).quantized(quantization)
