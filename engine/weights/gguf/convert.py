"""Converts a GGUF file into a Hugging Face style model directory."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tandem.engine.weights.gguf.config import describe, generation_config
from tandem.engine.weights.gguf.header import check_header
from tandem.engine.weights.gguf.rope import rope_scaling
from tandem.engine.weights.gguf.safetensors_file import num_data_bytes, write_safetensors
from tandem.engine.weights.gguf.tensors import Source, check_tensors, sources
from tandem.engine.weights.gguf.tokenizer import build_tokenizer, tokenizer_config

Progress = Callable[[str, float], None]


def convert_gguf(gguf_path: Path, out_dir: Path, on_progress: Progress | None = None) -> None:
    """Writes a GGUF file as a Hugging Face style directory of float32 weights.

    Memory holds one tensor at a time, of a stack of experts one expert. The directory appears only when complete, so
    several processes may convert at once: the first to finish wins. An ``out_dir`` that already holds a model is kept.

    Args:
        gguf_path: an architecture of ``families.FAMILIES``, any quantization that gguf can dequantize.
        out_dir: gets config.json, generation_config.json, tokenizer.json, tokenizer_config.json and model.safetensors.
        on_progress: called with a stage (``reading``, ``dequantising``) and the fraction done.

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
        model = describe(metadata, frozenset(tensors))
        check_tensors(model, tensors)
        config = {**model.config, "rope_scaling": rope_scaling(model.config, tensors)}
        tokenizer = build_tokenizer(metadata)
        texts = {
            "config.json": _json(config),
            "generation_config.json": _json(generation_config(config)),
            "tokenizer_config.json": _json(tokenizer_config(metadata, config["max_position_embeddings"])),
            "tokenizer.json": tokenizer.to_str(),
        }
    except ValueError as error:
        raise ValueError(f"cannot convert {gguf_path}: {error}") from error
    try:
        _write(texts, list(sources(model, tensors)), out_dir, report)
    except OSError as error:
        raise ValueError(f"cannot write the converted model to {out_dir}: {error}") from error


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _write(texts: Mapping[str, str], weights: Sequence[Source], out_dir: Path, report: Progress) -> None:
    """Renames a scratch directory, so that ``out_dir`` is never incomplete."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    shapes = {source.name: source.shape for source in weights}
    num_bytes, num_free = num_data_bytes(shapes.values()), shutil.disk_usage(out_dir.parent).free
    if num_bytes > num_free:
        raise OSError(f"it takes {num_bytes / 1e9:.1f} GB, but the disk has {num_free / 1e9:.1f} GB free")
    with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}.", dir=out_dir.parent) as scratch:
        # One level down: the scratch directory itself is private to this user.
        staged = Path(scratch) / "model"
        staged.mkdir()
        for name, text in texts.items():
            (staged / name).write_text(text, encoding="utf-8")
        write_safetensors(staged / "model.safetensors", shapes, _read(weights, num_bytes, report))
        try:
            staged.rename(out_dir)
        except OSError:
            if not (out_dir / "config.json").is_file():
                raise
            # Another process was first, with the same content.


def _read(weights: Sequence[Source], num_bytes: int, report: Progress) -> Iterator[np.ndarray]:
    num_read = 0
    for source in weights:
        report("dequantising", num_read / num_bytes)
        yield source.read()
        num_read += num_data_bytes([source.shape])
    report("dequantising", 1.0)


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
