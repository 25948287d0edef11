"""Small FP8 checkpoints of every kind on the hub, with models of the equivalent weights."""

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tandem.engine.layers.fp8 import FP8_DTYPE, FP8_MAX
from tandem.engine.models.quantization import BLOCK
from tests.fakes.fp8_schemes import KINDS

VOCAB_SIZE = 256
# Settings of families with experts.
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 256,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True},
    "dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
}
# Latents of keys and values have 192 numbers, no multiple of blocks.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
EXPERTS |= {
    "deepseek_v2": {**_LATENT, "q_lora_rank": None, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "deepseek_v3": {
        **_LATENT,
        "q_lora_rank": 128,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
    # Queries attend to all tokens: rounding to FP8 would choose others.
    "deepseek_v32": {
        **_LATENT,
        "q_lora_rank": 128,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "index_n_heads": 4,
        "index_head_dim": 64,
        "index_topk": 2048,
    },
    "glm4_moe_lite": {**_LATENT, "q_lora_rank": 256},
}
_NAMES = r"(?!weights_)[a-z]+_(?:[ab]_)?proj(?:_with_mqa)?|w[123]|wq_b|wk"
_PROJECTION = re.compile(rf"(.+\.layers\..+\.(?:{_NAMES}))\.weight")


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
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **shape | EXPERTS.get(family, {}) | settings)
    ).eval()
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
    input_scales = _input_scales(model) if kind.endswith("static") else {}
    with tempfile.TemporaryDirectory() as folder:
        # In the names and shapes of checkpoints, which are not the modules' if there are experts.
        model.save_pretrained(folder)
        plain = {name: tensor.clone() for name, tensor in load_file(f"{folder}/model.safetensors").items()}
        tensors = dict(plain)
        for name, weight in plain.items():
            match = _PROJECTION.fullmatch(name)
            if match is None or match[1] in ignore:
                continue
            numbers, scale, plain[name] = _quantized(weight, kind)
            tensors[name] = numbers
            tensors[f"{match[1]}.weight_scale_inv" if kind == "fp8_blocks" else f"{match[1]}.weight_scale"] = scale
            if kind.endswith("static"):
                tensors[f"{match[1]}.input_scale"] = input_scales[match[1]].view(1 if kind == "channels_static" else ())
        save_file(plain, f"{folder}/model.safetensors", {"format": "pt"})
        model.load_state_dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())
    path.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(path)
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | {"quantization_config": config}))
    # Sorted names put scales before or after their weights.
    save_file({name: tensors[name].contiguous() for name in sorted(tensors)}, path / "model.safetensors")
    return tensors


def _quantized(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return FP8 numbers, scales as a checkpoint of this kind has them, and the dequantized weights."""
    # (row blocks, rows per block, column blocks, columns per block), with a scale per block.
    out_size, in_size = weight.shape
    rows, columns = out_size, in_size
    if "blocks" in kind:
        rows = columns = BLOCK
    elif "channels" in kind:
        rows = 1
    padded = F.pad(weight, (0, -in_size % columns, 0, -out_size % rows))
    blocks = padded.view(len(padded) // rows, rows, padded.shape[1] // columns, columns)
    scale = blocks.abs().amax((1, 3), keepdim=True) / FP8_MAX
    numbers = (blocks / scale).to(FP8_DTYPE)
    dequantized = (numbers.float() * scale).view(padded.shape)[:out_size, :in_size]
    numbers = numbers.view(padded.shape)[:out_size, :in_size]
    if "tensors" in kind:
        scale = scale.view(1)
    elif "channels" in kind:
        scale = scale.view(out_size, 1).bfloat16()
        dequantized = numbers.float() * scale.float()
    elif "blocks" in kind:
        scale = scale[:, 0, :, 0]
    else:
        scale = scale.view(())
    return numbers, scale, dequantized


@torch.no_grad()
def _input_scales(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return scales that map each projection's largest input, over random tokens, to FP8's maximum."""
    largest: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Any:
        def note(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            for projection, most in _largest_inputs(name, module, inputs[0]):
                largest[projection] = torch.maximum(largest.get(projection, torch.zeros(())), most)

        return note

    handles = [
        module.register_forward_pre_hook(hook(name))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or name.endswith(".experts")
    ]
    generator = torch.Generator().manual_seed(3)
    model(torch.randint(model.config.vocab_size, (4, 128), generator=generator))
    for handle in handles:
        handle.remove()
    return {name: value / FP8_MAX for name, value in largest.items()}


def _largest_inputs(name: str, module: Any, x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(module, torch.nn.Linear):
        yield name, x.abs().max()
    else:
        of_mixtral = type(module).__name__.startswith("Mixtral")
        gate, up, down = ("w1", "w3", "w2") if of_mixtral else ("gate_proj", "up_proj", "down_proj")
        name = name.replace(".mlp.", ".block_sparse_moe.") if of_mixtral else name
        # Of all tokens, though each expert gets only some.
        for expert, (of_gate_up, of_down) in enumerate(zip(module.gate_up_proj, module.down_proj, strict=True)):
            of_gate, of_up = F.linear(x.view(-1, of_down.shape[0]), of_gate_up).chunk(2, dim=-1)
            yield f"{name}.{expert}.{gate}", x.abs().max()
            yield f"{name}.{expert}.{up}", x.abs().max()
            yield f"{name}.{expert}.{down}", (F.silu(of_gate) * of_up).abs().max()
