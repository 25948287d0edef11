"""Random adapters in PEFT's format, and models with adapters merged."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.engine.adapters.modules import adapted_modules
from tandem.engine.models.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    path: Path,
    model: ModelConfig,
    rank: int = 8,
    targets: Sequence[str] = ALL_TARGETS,
    seed: int = 0,
    *,
    size: float = 0.2,
    settings: Mapping[str, Any] | None = None,
    ranks: Mapping[str, int] | None = None,
) -> Path:
    """Writes a PEFT directory.

    Args:
        size: standard deviation of the numbers.
        settings: of adapter_config.json, over those of a plain adapter.
        ranks: of targets with another rank.
    """
    import torch
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for module, (out_size, in_size) in adapted_modules(model).items():
        target = module.rpartition(".")[2]
        if target in targets:
            of_target = (ranks or {}).get(target, rank)
            for part, shape in (("A", (of_target, in_size)), ("B", (out_size, of_target))):
                numbers = torch.randn(shape, generator=generator) * size
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = numbers
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "a/base",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.05,
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "target_modules": list(targets),
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": dict(ranks or {}),
        **(settings or {}),
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def merged(reference: "PreTrainedModel", path: Path) -> Any:
    """Returns a copy of a model with W + scale * B A in place of each adapted W."""
    import copy

    import torch
    from safetensors.torch import load_file

    model = copy.deepcopy(reference)
    config = json.loads((path / "adapter_config.json").read_text())
    tensors = load_file(path / "adapter_model.safetensors")
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, a in tensors.items():
            if ".lora_A." in name:
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                rank = len(a)
                scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
                weights[f"{module}.weight"] += scale * tensors[name.replace("lora_A", "lora_B")] @ a
    return model
