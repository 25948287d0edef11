"""Random adapters of the tiny model, and their oracles."""

from collections.abc import Mapping
from pathlib import Path

from tandem.engine.models.config import ModelConfig
from tests.cluster.conftest import Oracle
from tests.fakes.adapters import merged as merged_model
from tests.fakes.adapters import write_adapter

RANKS = (1, 2, 3, 4, 6, 8, 12, 16)


class AdapterOracle(Oracle):
    """Greedy decoding by transformers with an adapter's weights merged, in float32."""

    def __init__(self, model_dir: Path, adapter: Path) -> None:
        super().__init__(model_dir)
        self._model = merged_model(self._model, adapter).eval()


def write_adapters(root: Path, model_dir: Path) -> Mapping[str, Path]:
    """Writes an adapter of each of RANKS, by name."""
    model = ModelConfig.from_dir(model_dir)
    return {f"rank-{rank}": write_adapter(root / f"rank-{rank}", model, rank=rank, seed=rank) for rank in RANKS}
