"""Converts a GGUF file of the Llama architecture into a Hugging Face style model directory."""

from __future__ import annotations

import json
import math
import reprlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from tandem.engine.weights.gguf_header import check_header
from tandem.engine.weights.gguf_tokenizer import build_tokenizer, check_tokens, token_id, tokenizer_config

Progress = Callable[[str, float], None]
Tensors = Mapping[str, gguf.ReaderTensor]

_GLOBAL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
# Above every size and length of a model.
MAX_NUMBER = 2**31

# Each changes the arithmetic; a plain Llama has none, or these values.
_NEUTRAL_METADATA: dict[str, Any] = {
    "llama.attention.clamp_kqv": 0.0,
    "llama.attention.max_alibi_bias": 0.0,
    "llama.attention.scale": 0.0,
    "llama.attention.sliding_window": 0,
    "llama.embedding_scale": 1.0,
    "llama.expert_count": 0,
    "llama.logit_scale": 1.0,
    "llama.residual_scale": 1.0,
    "llama.rope.scale_linear": 1.0,
    "llama.rope.scaling.factor": 1.0,
    "llama.rope.scaling.type": "none",
}


def convert_gguf(gguf_path: Path, out_dir: Path, on_progress: Progress | None = None) -> None:
    """Writes a GGUF file as a Hugging Face style directory of float32 weights.

    The directory appears only when complete, so several processes may convert at once: the first to finish wins. An
    ``out_dir`` that already holds a model is kept.

    Args:
        gguf_path: architecture ``llama``, any quantization that gguf can dequantize.
        out_dir: gets config.json, generation_config.json, tokenizer.json, tokenizer_config.json and model.safetensors.
        on_progress: called with a stage (``reading``, ``dequantising``, ``saving``) and the fraction done.

    Raises:
        ValueError: the file is missing, not a GGUF, or would run wrongly here; or ``out_dir`` cannot be written.
    """
    if (out_dir / "config.json").is_file():
        return
    report: Progress = on_progress or (lambda stage, fraction: None)
    report("reading", 0.0)
    reader = _open(gguf_path)
    try:
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        config = _model_config(metadata, tensors)
        tokenizer = build_tokenizer(metadata)
        texts = {
            "config.json": _json(config),
            "generation_config.json": _json(_generation_config(config)),
            "tokenizer_config.json": _json(tokenizer_config(metadata)),
            "tokenizer.json": tokenizer.to_str(),
        }
        weights = _weights(config, tensors, report)
    except ValueError as error:
        raise ValueError(f"cannot convert {gguf_path}: {error}") from error
    report("saving", 0.0)
    try:
        _write(texts, weights, out_dir)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot write the converted model to {out_dir}: {error}") from error
    report("saving", 1.0)


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _write(texts: Mapping[str, str], weights: dict[str, np.ndarray], out_dir: Path) -> None:
    """Renames a scratch directory, so that ``out_dir`` is never incomplete."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}.", dir=out_dir.parent) as scratch:
        # One level down: the scratch directory itself is private to this user.
        staged = Path(scratch) / "model"
        staged.mkdir()
        for name, text in texts.items():
            (staged / name).write_text(text, encoding="utf-8")
        save_file(weights, staged / "model.safetensors", metadata={"format": "pt"})
        # safetensors makes files private.
        shutil.copymode(staged / "config.json", staged / "model.safetensors")
        try:
            staged.rename(out_dir)
        except OSError:
            if not (out_dir / "config.json").is_file():
                raise
            # Another process was first, with the same content.


def _open(path: Path) -> gguf.GGUFReader:
    if not path.is_file():
        raise ValueError(f"no such GGUF file: {path}")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
    check_header(path)
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(
            f"cannot read {path}: {error}; it is truncated, or uses a format or quantisation unknown to "
            "the installed gguf package"
        ) from error


def _model_config(metadata: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"architecture {reprlib.repr(architecture)} is not supported in GGUF, only 'llama'")
    check_tokens(metadata)
    for key, neutral in _NEUTRAL_METADATA.items():
        if (value := metadata.get(key, neutral)) != neutral:
            raise ValueError(f"{key} = {reprlib.repr(value)} is not supported")
    hidden_size, num_heads = _int(metadata, "embedding_length"), _int(metadata, "attention.head_count")
    if hidden_size % num_heads and "llama.attention.key_length" not in metadata:
        raise ValueError(f"llama.embedding_length {hidden_size} is not a multiple of {num_heads} attention heads")
    head_dim = _int(metadata, "attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := _int(metadata, key, head_dim)) != head_dim:
            raise ValueError(f"llama.{key} = {value} differs from the head size {head_dim}: not supported")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_size": hidden_size,
        "intermediate_size": _int(metadata, "feed_forward_length"),
        "num_hidden_layers": _int(metadata, "block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _int(metadata, "attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": _float(metadata, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _float(metadata, "rope.freq_base", 10_000.0),
        "max_position_embeddings": _int(metadata, "context_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": token_id(metadata, "bos"),
        "eos_token_id": _eos_token_ids(metadata),
        "pad_token_id": token_id(metadata, "padding"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
    }
    _check_names(config, tensors)
    _check_shapes(config, tensors)
    config["rope_scaling"] = _rope_scaling(config, tensors)
    return config


def _int(metadata: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = metadata.get(f"llama.{name}", default)
    # type(): bool is an int in Python. A list means sizes that differ between layers.
    if type(value) is not int or not 0 < value < MAX_NUMBER:
        raise ValueError(f"llama.{name} must be a positive integer below {MAX_NUMBER}, got {reprlib.repr(value)}")
    return value


def _float(metadata: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = metadata.get(f"llama.{name}", default)
    if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"llama.{name} must be a number above 0, got {reprlib.repr(value)}")
    # GGUF keeps float32. Its shortest form is the model author's number: 1e-05, not 9.99999974e-06.
    return float(str(np.float32(value)))


def _eos_token_ids(metadata: Mapping[str, Any]) -> int | list[int] | None:
    ids = [token_id(metadata, name) for name in ("eos", "eot", "eom")]
    unique = [index for index in dict.fromkeys(ids) if index is not None]
    return unique if len(unique) > 1 else next(iter(unique), None)


def _generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: config[name] for name in names if config[name] is not None}


def _tensor_names(config: Mapping[str, Any]) -> dict[str, str]:
    names = dict(_GLOBAL_TENSORS)
    if config["tie_word_embeddings"]:
        del names["output.weight"]
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in _LAYER_TENSORS.items():
            names[f"blk.{layer}.{theirs}"] = f"model.layers.{layer}.{ours}"
    return names


def _check_names(config: Mapping[str, Any], tensors: Tensors) -> None:
    # Before the names are made: the metadata may say any number.
    num_layers, found = config["num_hidden_layers"], {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    if num_layers > len(found):
        raise ValueError(f"llama.block_count is {num_layers}, but the file has tensors of {len(found)} layers")
    expected = set(_tensor_names(config))
    if missing := expected - set(tensors):
        raise ValueError(f"{len(missing)} tensors are missing, for example {min(missing)}")
    # A bias, an expert or a norm on q means that the model is not a plain Llama.
    if unknown := set(tensors) - expected - {_ROPE_FACTORS}:
        raise ValueError(f"{len(unknown)} tensors have no place in a Llama, for example {min(unknown)}")


def _check_shapes(config: Mapping[str, Any], tensors: Tensors) -> None:
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    num_q, num_kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    vocab_size = config["vocab_size"]
    # Columns first, as GGUF has them.
    shapes = {
        "token_embd.weight": [hidden, vocab_size],
        "output.weight": [hidden, vocab_size],
        "attn_q.weight": [hidden, num_q],
        "attn_k.weight": [hidden, num_kv],
        "attn_v.weight": [hidden, num_kv],
        "attn_output.weight": [num_q, hidden],
        "ffn_gate.weight": [hidden, inner],
        "ffn_up.weight": [hidden, inner],
        "ffn_down.weight": [inner, hidden],
    }
    for name in _tensor_names(config):
        expected = shapes.get(name.split(".", 2)[-1] if name.startswith("blk.") else name, [hidden])
        if (shape := tensors[name].shape.tolist()) != expected:
            raise ValueError(f"tensor {name} has shape {shape}, but the metadata says {expected}")


def _rope_scaling(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Any] | None:
    """Returns None without scaling. The file has one factor per rotary frequency."""
    if _ROPE_FACTORS not in tensors:
        return None
    factors = np.asarray(_dequantize(tensors[_ROPE_FACTORS]), dtype=np.float64)
    head_dim, factor = config["head_dim"], float(factors.max())
    # The file lacks these parameters, which all Llama 3 releases share.
    low, high, original = 1.0, 4.0, 8192
    wavelengths = 2 * np.pi * config["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ValueError(f"{_ROPE_FACTORS} holds a rope scaling that is not Llama 3's: not supported")
    if factor == 1.0:
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _dequantize(tensor: gguf.ReaderTensor) -> np.ndarray:
    try:
        return gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ValueError(f"tensor {tensor.name} is quantised as {kind}, which is unknown") from error


def _weights(config: Mapping[str, Any], tensors: Tensors, report: Progress) -> dict[str, np.ndarray]:
    heads = {
        "attn_q.weight": config["num_attention_heads"],
        "attn_k.weight": config["num_key_value_heads"],
    }
    weights = {}
    names = _tensor_names(config)
    for done, (theirs, ours) in enumerate(names.items()):
        report("dequantising", done / len(names))
        weight = _dequantize(tensors[theirs])
        if (num_heads := heads.get(theirs.split(".", 2)[-1])) is not None:
            weight = _unpermute(weight, num_heads)
        weights[ours] = np.ascontiguousarray(weight, dtype=np.float32)
    report("dequantising", 1.0)
    return weights


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Returns the rows of a q or k projection in Hugging Face order.

    GGUF interleaves the two halves of a head: rows (heads, head_dim / 2, 2) become (heads, 2, head_dim / 2).
    """
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
