"""Reads a model's shape by the name that `tandem serve` takes."""

from pathlib import Path

from tandem.decode_worker.speculation import parse_speculation
from tandem.engine.draft_models.config import DrafterConfig, read_drafter
from tandem.engine.models.config import ModelConfig
from tandem.engine.weights.resolve import resolve_model


def read_model(name: str, quantization: str) -> ModelConfig:
    """Fetches config.json, no weights. Raises ValueError: the model is not found, not fetched or not supported."""
    return ModelConfig.from_dir(Path(resolve_model(name, "dummy"))).quantized(quantization)


def read_drafter_of(speculation: str, model: ModelConfig) -> DrafterConfig | None:
    """Args: speculation: as in `tandem serve`, of a model that drafts, or "". Raises ValueError: as read_model, or it
    cannot draft for the model."""
    if not speculation:
        return None
    if not parse_speculation(speculation).is_by_model:
        raise ValueError(f"--speculation {speculation} drafts without a model: --drafted and --accepted suffice")
    source, _, name = speculation.partition(":")
    if source == "draft":
        speculation = f"draft:{resolve_model(name, 'dummy')}"
    return read_drafter(speculation, model, Path())
