"""Checks whether the adapter of a directory can be served, before its name is known to anyone."""

from dataclasses import dataclass
from pathlib import Path

from tandem.adapters import AdapterRef
from tandem.engine.adapters.peft import read_info
from tandem.engine.config import EngineConfig
from tandem.engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class AdapterCheck:
    """
    Attributes:
        root: directory below which adapters are loaded while the cluster serves; "": none are.
    """

    engine: EngineConfig
    root: str

    def __call__(self, path: str) -> AdapterRef:
        """Reads an adapter's tensors. Raises ValueError: it cannot be served."""
        return read_adapter(self.engine, path_below(self.root, path))


def read_adapter(engine: EngineConfig, path: Path) -> AdapterRef:
    """Raises ValueError: the adapter does not fit the model or the limits of `engine`."""
    if not engine.max_loras:
        raise ValueError("the workers take no adapters: start the cluster with --max-loras")
    model = ModelConfig.from_dir(Path(engine.model_dir)).quantized(engine.quantization)
    return read_info(path, model, engine.max_lora_rank)


def path_below(root: str, path: str) -> Path:
    """Returns the real path of a directory below `root`; a relative one begins there.

    Raises:
        ValueError: there is no root, or the path leads out of it.
    """
    if not root:
        raise ValueError("no adapters are loaded while this cluster serves: start it with --lora-root")
    real_root = Path(root).resolve()
    real = (real_root / path).resolve()
    if not real.is_relative_to(real_root):
        raise ValueError(f"{path} lies outside --lora-root {root}")
    if not real.is_dir():
        raise ValueError(f"there is no directory {path} below --lora-root {root}")
    return real
