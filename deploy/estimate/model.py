"""Reads a model's shape by the name that `tandem serve` takes."""

from dataclasses import replace
from pathlib import Path

from tandem.decode_worker.speculation import parse_speculation
from tandem.deploy.drafter import resolve_drafter
from tandem.engine.draft_models.config import DRAFT, DrafterConfig, read_drafter
from tandem.engine.models.config import ModelConfig
from tandem.engine.weights.resolve import resolve_model


def read_model(name: str, quantization: str) -> ModelConfig:
    """Fetches config.json, no weights. Raises ValueError: the model is not found, not fetched or not supported."""
    return ModelConfig.from_dir(Path(resolve_model(name, "dummy"))).quantized(quantization)


def read_drafter_of(speculation: str | None, name: str, model: ModelConfig, quantization: str) -> DrafterConfig | None:
    """
    Args:
        name, model: of the model that is served.
        speculation: as in `tandem serve`, of a model that drafts; None: none.

    Raises:
        ValueError: as read_model, or it cannot draft for the model.
    """
    if speculation is None:
        return None
    if not parse_speculation(speculation).is_by_model:
        raise ValueError(f"`speculation` {speculation} drafts without a model: --drafted and --accepted suffice")
    found = read_drafter(resolve_drafter(speculation, "dummy"), model, Path(resolve_model(name, "dummy")))
    if found is None or found.source != DRAFT:
        return found
    return replace(found, model=found.model.quantized(quantization))
