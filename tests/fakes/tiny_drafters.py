"""Random layers that draft for tiny models."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

EAGLE_VOCAB_SIZE = 64


def add_mtp_layer(directory: Path, seed: int = 1) -> None:
    """Adds the layer behind the last of a checkpoint of a family that has one."""
    weights = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    num_layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    last, added = f"model.layers.{num_layers - 1}.", f"model.layers.{num_layers}."
    shapes = {added + name.removeprefix(last): t.shape for name, t in weights.items() if name.startswith(last)}
    shapes |= {f"{added}{name}.weight": torch.Size([hidden]) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes[f"{added}eh_proj.weight"] = torch.Size([hidden, 2 * hidden])
    weights |= _random(shapes, seed)
    weights[f"{added}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{added}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config["num_nextn_predict_layers"] = 1
    (directory / "config.json").write_text(json.dumps(config))


def save_eagle_head(directory: Path, target: Path, seed: int = 1, head_dim: int = 8) -> None:
    """Saves a head with fewer tokens and another number of KV heads than the target."""
    of_target = json.loads((target / "config.json").read_text())
    hidden, vocab_size, heads, size = of_target["hidden_size"], of_target["vocab_size"], 4, 96
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": vocab_size,
        "draft_vocab_size": EAGLE_VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 1],
    }
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": (heads * head_dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (head_dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (head_dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads * head_dim),
        "midlayer.mlp.gate_proj.weight": (size, hidden),
        "midlayer.mlp.up_proj.weight": (size, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, size),
        "lm_head.weight": (EAGLE_VOCAB_SIZE, hidden),
    }
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    shapes |= {f"{name}.weight": (hidden,) for name in norms}
    weights = _random({name: torch.Size(shape) for name, shape in shapes.items()}, seed)
    # Every third token.
    weights["d2t"] = 2 * torch.arange(EAGLE_VOCAB_SIZE)
    weights["t2d"] = torch.arange(vocab_size) % 3 == 0
    directory.mkdir()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))


def _random(shapes: dict[str, torch.Size], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.empty(shape).normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
        for name, shape in shapes.items()
    }
