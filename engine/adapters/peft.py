"""Reads and checks PEFT directories. Imports no torch."""

import hashlib
import json
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tandem.adapters import AdapterRef
from tandem.engine.adapters.base import AdapterError
from tandem.engine.adapters.modules import adapted_modules
from tandem.engine.adapters.peft_config import PeftConfig
from tandem.engine.models.config import ModelConfig
from tandem.engine.weights.headers import TensorPlace, tensor_places

TENSOR_FILE = "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_DTYPES = ("F32", "BF16", "F16")
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120

Content = np.ndarray[Any, np.dtype[np.uint8]]


class ModuleTensors(NamedTuple):
    """An adapter's part in one module: scale * B A is added to its matrix.

    Attributes:
        a: (rank, in_size).
        b: (out_size, rank).
    """

    rank: int
    scale: float
    a: TensorPlace
    b: TensorPlace


class PeftAdapter(NamedTuple):
    """
    Attributes:
        modules: by name, sorted.
        content: the file's bytes, which the info's hash covers.
    """

    info: AdapterRef
    modules: Mapping[str, ModuleTensors]
    content: Content


def read_info(path: Path, model: ModelConfig, max_rank: int) -> AdapterRef:
    """Checks an adapter and hashes its content, about a second per GB.

    Raises:
        AdapterError: the model cannot compute with it. The message, of one line, says why.
    """
    return read_adapter(path, model, max_rank).info


def read_adapter(path: Path, model: ModelConfig, max_rank: int) -> PeftAdapter:
    """Reads an adapter into memory. Raises AdapterError as read_info."""
    try:
        shapes = adapted_modules(model)
    except ValueError as error:
        raise AdapterError(str(error)) from error
    config = PeftConfig.read(path)
    file = path / TENSOR_FILE
    if not file.is_file():
        for name in _PICKLES:
            if (path / name).exists():
                raise AdapterError(f"{path / name} is a pickle file, which may run code: save it as {TENSOR_FILE}")
        raise AdapterError(f"{path} has no {TENSOR_FILE}")
    try:
        places = tensor_places(file)
        modules = _modules(config, places, shapes, max_rank)
        content = np.fromfile(file, np.uint8)
    except OSError as error:
        raise AdapterError(f"cannot read {file}: {error.strerror}") from error
    except AdapterError as error:
        raise AdapterError(f"{file}: {error}") from error
    except ValueError as error:
        raise AdapterError(str(error)) from error
    if len(content) < max((place.end for place in places.values()), default=0):
        raise AdapterError(f"{file} changed while it was read")
    info = AdapterRef(
        _hash(modules, content),
        str(path),
        max(module.rank for module in modules.values()),
        tuple(sorted({name.rpartition(".")[2] for name in modules})),
        sum(place.end - place.begin for place in places.values()),
        config.base_model,
    )
    return PeftAdapter(info, modules, content)


def _modules(
    config: PeftConfig,
    places: Mapping[str, TensorPlace],
    shapes: Mapping[str, tuple[int, int]],
    max_rank: int,
) -> dict[str, ModuleTensors]:
    found: dict[str, dict[str, TensorPlace]] = {}
    for name, place in places.items():
        match = _TENSOR.fullmatch(name)
        if match is None or match[1] not in shapes:
            raise AdapterError(f"tensor {_SHORT.repr(name)} {_why_not(name, shapes)}")
        found.setdefault(match[1], {})[match[2]] = place
    if not found:
        raise AdapterError("it has no tensors")
    _check_complete(config, found, shapes)
    return {name: _module(name, config, tensors, shapes[name], max_rank) for name, tensors in sorted(found.items())}


def _module(
    name: str, config: PeftConfig, tensors: Mapping[str, TensorPlace], shape: tuple[int, int], max_rank: int
) -> ModuleTensors:
    if len(tensors) < 2:
        raise AdapterError(f"module {name} lacks lora_{'B' if 'A' in tensors else 'A'}")
    rank = config.rank_of(name)
    if rank > max_rank:
        raise AdapterError(f"module {name} has rank {rank}, more than --max-lora-rank {max_rank}")
    for part, wanted in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
        place = tensors[part]
        if place.shape != wanted:
            raise AdapterError(
                f"lora_{part} of {name} has shape {place.shape}, but this model needs {wanted}: the adapter belongs to "
                f"another base ({config.base_model or 'not named'}) or its configuration is not its own"
            )
        if place.dtype not in _DTYPES:
            raise AdapterError(f"lora_{part} of {name} has dtype {place.dtype}, not one of {', '.join(_DTYPES)}")
    return ModuleTensors(rank, config.scale_of(name), tensors["A"], tensors["B"])


def _why_not(name: str, shapes: Mapping[str, tuple[int, int]]) -> str:
    """Returns why a tensor cannot be used, to follow its name."""
    if "lora_magnitude_vector" in name:
        return "belongs to DoRA, which is not supported"
    if "lora_embedding" in name or "embed_tokens" in name or "lm_head" in name:
        return "belongs to an embedding or the output matrix, which adapters cannot change here"
    if "expert" in name:
        return "belongs to experts, which adapters cannot change here: only attention's projections"
    if name.endswith(".bias"):
        return "is a bias, which adapters cannot have here"
    ends = sorted({module.rpartition(".")[2] for module in shapes})
    if any(f".{end}.lora_" in name for end in ends):
        return "is of a module that this model does not have: the adapter belongs to another base"
    return f"belongs to no module of this model that adapters can change: {', '.join(ends)}"


def _check_complete(config: PeftConfig, found: Mapping[str, object], shapes: Mapping[str, tuple[int, int]]) -> None:
    for target in config.targets:
        wanted = [name for name in shapes if name == target or name.endswith(f".{target}")]
        if not wanted:
            raise AdapterError(f"target_modules has {_SHORT.repr(target)}, which {_why_not(target, shapes)}")
        missing = [name for name in wanted if name not in found]
        if missing and (config.whole or len(missing) == len(wanted)):
            raise AdapterError(f"target_modules has {_SHORT.repr(target)}, but {missing[0]} has no tensors")


def _hash(modules: Mapping[str, ModuleTensors], content: Content) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, (rank, scale, *places) in modules.items():
        described = [name, rank, scale, [[place.dtype, *place.shape] for place in places]]
        digest.update(json.dumps(described).encode())
        for place in places:
            digest.update(content[place.begin : place.end].data)
    return digest.hexdigest()
