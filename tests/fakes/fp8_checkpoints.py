"""Small FP8 checkpoints of every kind on the hub, with models of the equivalent weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tandem.engine.layers.fp8 import FP8_DTYPE, FP8_MAX
from tandem.engine.models.quantization import BLOCK
from tests.fakes.fp8_schemes import KINDS

VOCAB_SIZE = 256


def make_model(family: str, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """Make a random float32 model whose matrices divide into blocks."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "eos_token_id": None,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape | settings)).eval()
    model.config.architectures = [type(model).__name__]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.06)
    return model


@torch.no_grad()
def save_fp8(model: PreTrainedModel, path: Path, kind: str, ignore: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """Save a model as an FP8 checkpoint and replace its weights with the dequantized ones.

    Args:
        ignore: projections that are not quantized.

    Returns:
        The checkpoint's tensors.
    """
    config = json.loads(json.dumps(KINDS[kind]))
    if ignore:
        config.setdefault("ignore" if config["quant_method"] != "fp8" else "modules_to_not_convert", []).extend(ignore)
    input_scales = _input_scales(model)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head" or name in ignore:
            continue
        weight = module.weight
        # (row blocks, rows per block, column blocks, columns per block), with a scale per block.
        out_size, in_size = weight.shape
        rows, columns = out_size, in_size
        if "blocks" in kind:
            rows = columns = BLOCK
        elif "channels" in kind:
            rows = 1
        blocks = weight.view(out_size // rows, rows, in_size // columns, columns)
        scale = blocks.abs().amax((1, 3), keepdim=True) / FP8_MAX
        numbers = (blocks / scale).to(FP8_DTYPE)
        weight.copy_((numbers.float() * scale).view(out_size, in_size))
        tensors[f"{name}.weight"] = numbers.view(out_size, in_size)
        if "tensors" in kind:
            scale = scale.view(1)
        elif "channels" in kind:
            scale = scale.view(out_size, 1).bfloat16()
            weight.copy_(tensors[f"{name}.weight"].float() * scale.float())
        elif "blocks" in kind:
            scale = scale.view(out_size // rows, in_size // columns)
        else:
            scale = scale.view(())
        tensors[f"{name}.weight_scale_inv" if kind == "fp8_blocks" else f"{name}.weight_scale"] = scale
        if kind.endswith("static"):
            tensors[f"{name}.input_scale"] = input_scales[name].view(1 if kind == "channels_static" else ())
    path.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(path)
    plain = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(plain | {"quantization_config": config}))
    # Sorted names put scales before or after their weights.
    save_file({name: tensors[name].contiguous() for name in sorted(tensors)}, path / "model.safetensors")
    return tensors


@torch.no_grad()
def _input_scales(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return scales that map each projection's largest input, over random tokens, to FP8's maximum."""
    largest: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Any:
        def note(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            largest[name] = torch.maximum(largest.get(name, torch.zeros(())), inputs[0].abs().max())

        return note

    handles = [
        module.register_forward_pre_hook(hook(name))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    generator = torch.Generator().manual_seed(3)
    model(torch.randint(model.config.vocab_size, (4, 128), generator=generator))
    for handle in handles:
        handle.remove()
    return {name: value / FP8_MAX for name, value in largest.items()}
