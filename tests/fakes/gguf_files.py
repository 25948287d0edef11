"""GGUF files of models that transformers made, written with the gguf package's own names and keys."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
# As many tokens as the tiny models have.
TOKENS = [*ALPHABET[5:], "Ġt", "he", "Ġthe", "<s>", "</s>"]
ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
}
PRE_TOKENIZERS = {"llama": "llama-bpe", "olmoe": "olmo"}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+\.weight)")

Metadata = Mapping[str, Any]
Arrays = Mapping[str, np.ndarray | None]


def write_model(
    path: Path,
    checkpoint: Path,
    metadata: Metadata | None = None,
    tensors: Arrays | None = None,
    quantized: bool = False,
) -> Path:
    """Writes a checkpoint as GGUF.

    Args:
        metadata, tensors: replaced keys and tensors; None: left out. A key that begins with a dot is the
            architecture's.
        quantized: matrices in Q8_0, but routers, and those whose rows are no whole blocks.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    arrays = {**_tensors(config, load_file(checkpoint / "model.safetensors")), **(tensors or {})}
    writer = gguf.GGUFWriter(path, (metadata or {}).get("general.architecture", architecture))
    replaced = {architecture + key if key.startswith(".") else key: value for key, value in (metadata or {}).items()}
    _add_metadata(writer, {**_metadata(config, architecture), **replaced})
    for name, array in arrays.items():
        if array is not None:
            kind = gguf.GGMLQuantizationType.Q8_0 if quantized and is_quantized(name, array) else None
            writer.add_tensor(name, gguf.quantize(array, kind) if kind is not None else array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def is_quantized(name: str, array: np.ndarray) -> bool:
    """Args: name: in the GGUF file, or in the checkpoint."""
    is_router = "gate_inp" in name or name.endswith((".gate.weight", "expert_gate.weight"))
    return array.ndim > 1 and array.shape[-1] % 32 == 0 and not is_router


def rounded(array: np.ndarray) -> np.ndarray:
    """Returns an array as it is after quantization to Q8_0."""
    kind = gguf.GGMLQuantizationType.Q8_0
    return np.asarray(gguf.dequantize(gguf.quantize(array, kind), kind))


def _metadata(config: Metadata, architecture: str) -> dict[str, Any]:
    keys = {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    }
    sizes = {f"{architecture}.{theirs}": config[ours] for theirs, ours in keys.items() if config.get(ours) is not None}
    num_experts = config.get("num_experts", config.get("num_local_experts"))
    if num_experts is not None:
        sizes[f"{architecture}.expert_count"] = num_experts
    return sizes | {
        f"{architecture}.rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": PRE_TOKENIZERS.get(architecture, "qwen2"),
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * (len(TOKENS) - 2) + [3, 3],
        "tokenizer.ggml.merges": ["Ġ t", "h e", "Ġt he"],
        "tokenizer.ggml.bos_token_id": len(TOKENS) - 2,
        "tokenizer.ggml.eos_token_id": len(TOKENS) - 1,
    }


def _add_metadata(writer: gguf.GGUFWriter, metadata: Metadata) -> None:
    adders: dict[type, Callable[..., None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        if value is not None and key != "general.architecture":
            adders[type(value)](key, value)


def _tensors(config: Metadata, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    architecture = ARCHITECTURES[config["model_type"]]
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    tensors = {}
    for name, weight in _with_stacks(weights):
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            interleaved = np.arange(head_dim).reshape(2, -1).T.reshape(-1)
            weight = weight[np.arange(len(weight)).reshape(-1, head_dim)[:, interleaved].reshape(-1)]
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        # As converters do: the gate of a shared expert has one row.
        tensors[theirs] = np.ascontiguousarray(weight.squeeze())
    return tensors


def _with_stacks(weights: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    stacks: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for name, weight in weights.items():
        if match := _EXPERT.fullmatch(name):
            stacks[f"{match[1]}.{match[3]}"][int(match[2])] = weight
        else:
            yield name, weight
    for name, stack in stacks.items():
        yield name, np.stack([stack[expert] for expert in range(len(stack))])
