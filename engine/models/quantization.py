"""FP8 scheme of a checkpoint. Imports no torch."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tandem.engine.models.checks import require_dict

# Side of a weight block, and length of a group of inputs, with one scale.
BLOCK = 128
# FP8 products require sizes that are multiples of this.
FP8_MULTIPLE = 16
FP8 = "fp8"
# Begins a regular expression among ignored modules.
_PATTERN = "re:"
SUPPORTED = (
    "supported are FP8 weights (float8_e4m3fn) with a scale for each tensor, for each channel, or for each block of "
    f"{BLOCK}x{BLOCK}, as compressed-tensors and fp8 have them"
)

WeightScales = Literal["tensor", "channel", "block"]
InputScales = Literal["static", "token", "group"]


@dataclass(frozen=True, slots=True)
class Quantization:
    """FP8 weights (float8_e4m3fn) of the layers' projections; everything else has the model's dtype.

    Attributes:
        weights: a scale per projection, per output, or per BLOCK x BLOCK numbers.
        inputs: scales "static" from the checkpoint, per token, or per group of BLOCK numbers of a token. A dynamic
            scale per batch is computed per token, so requests do not affect each other.
        ignored: modules without FP8, by name, end of name, or "re:PATTERN".
        scale_name: suffix of a projection's scales in the checkpoint.
        at_load: True if plain weights become FP8 when loaded.
    """

    weights: WeightScales = "channel"
    inputs: InputScales = "token"
    ignored: tuple[str, ...] = ()
    scale_name: str = "weight_scale"
    at_load: bool = False

    def covered(self, modules: Iterable[str]) -> list[bool]:
        """Returns which modules have FP8 weights. Args: modules: like model.layers.0.mlp.up_proj."""
        # Mixtures have thousands of modules, and their checkpoints ignore hundreds.
        names = frozenset(name for name in self.ignored if not name.startswith(_PATTERN))
        patterns = [re.compile(name[len(_PATTERN) :]) for name in self.ignored if name.startswith(_PATTERN)]
        return [
            names.isdisjoint(_ends(module)) and not any(pattern.match(module) for pattern in patterns)
            for module in modules
        ]

    def covers(self, modules: Sequence[str]) -> bool:
        """Returns whether modules that must be alike have FP8 weights. Raises ValueError if only some have."""
        covered = self.covered(modules)
        if len(set(covered)) > 1:
            plain, fp8 = modules[covered.index(False)], modules[covered.index(True)]
            raise ValueError(
                f"quantization_config ignores {plain}, but not {fp8}: ignore all or none of projections that are one "
                "matrix, and of a layer's experts"
            )
        return covered[0]


AT_LOAD = Quantization(at_load=True)


def read_quantization(raw: dict[str, Any]) -> Quantization | None:
    """Reads the scheme in config.json; None: no quantization.

    Raises:
        ValueError: the scheme is not supported; the message names the key and the supported schemes.
    """
    key = "quantization_config" if raw.get("quantization_config") is not None else "compression_config"
    if raw.get(key) is None:
        return None
    config = require_dict(key, raw[key])
    method = config.get("quant_method", "compressed-tensors" if key == "compression_config" else None)
    if method == "fp8":
        return _fp8(config)
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    raise ValueError(f"{key}: quant_method {method!r} is not supported; {SUPPORTED}")


def _fp8(config: dict[str, Any]) -> Quantization:
    scheme, block, fmt = config.get("activation_scheme"), config.get("weight_block_size"), config.get("fmt", "e4m3")
    if fmt not in ("e4m3", "float8_e4m3fn"):
        raise ValueError(f"quantization_config: fmt {fmt!r} is not supported; {SUPPORTED}")
    if config.get("scale_fmt") not in (None, "float"):
        raise ValueError(f"quantization_config: scale_fmt {config['scale_fmt']!r} is not supported; {SUPPORTED}")
    if scheme not in ("static", "dynamic"):
        raise ValueError(f"quantization_config: activation_scheme must be static or dynamic, not {scheme!r}")
    ignored = (*_strings(config, "modules_to_not_convert"), *_strings(config, "ignored_layers"))
    if block is None:
        return Quantization("tensor", "static" if scheme == "static" else "token", ignored)
    _check_block("weight_block_size", block)
    if scheme == "static":
        raise ValueError("quantization_config: activation_scheme static with weight_block_size is not supported")
    return Quantization("block", "group", ignored, scale_name="weight_scale_inv")


def _compressed_tensors(config: dict[str, Any]) -> Quantization:
    if config.get("sparsity_config") and config["sparsity_config"].get("format", "dense") != "dense":
        raise ValueError("quantization_config: sparse weights are not supported")
    groups = require_dict("config_groups", config.get("config_groups"))
    found = {_scheme(name, require_dict(f"config_groups.{name}", group)) for name, group in groups.items()}
    if len(found) != 1:
        raise ValueError(f"quantization_config: config_groups must have one scheme for all layers, not {len(found)}")
    ((weights, inputs),) = found
    return Quantization(weights, inputs, _strings(config, "ignore"))


def _scheme(name: str, group: dict[str, Any]) -> tuple[WeightScales, InputScales]:
    where = f"quantization_config: config_groups.{name}"
    if group.get("targets") != ["Linear"]:
        raise ValueError(f"{where}.targets must be ['Linear'], not {group.get('targets')!r}")
    if group.get("output_activations") is not None:
        raise ValueError(f"{where}.output_activations is set, but quantized outputs are not supported")
    weights = require_dict(f"{where}.weights", group.get("weights"))
    if group.get("input_activations") is None:
        raise ValueError(f"{where}.input_activations is not set, but FP8 weights multiply FP8 inputs")
    inputs = require_dict(f"{where}.input_activations", group["input_activations"])
    for part, scheme in (("weights", weights), ("input_activations", inputs)):
        if scheme.get("num_bits") != 8 or scheme.get("type") != "float":
            kind = f"{scheme.get('num_bits')} bits of type {scheme.get('type')!r}"
            raise ValueError(f"{where}.{part} has {kind}, which is not supported; {SUPPORTED}")
        if not scheme.get("symmetric", True):
            raise ValueError(f"{where}.{part} is not symmetric, but FP8 scales must be")
    if weights.get("dynamic"):
        raise ValueError(f"{where}.weights.dynamic is set, but the scales of weights must be static")
    of_weights, of_inputs = weights.get("strategy"), inputs.get("strategy")
    dynamic = inputs.get("dynamic", False)
    if of_weights == "block":
        _check_block(f"{where}.weights.block_structure", weights.get("block_structure"))
        if of_inputs == "group" and dynamic and inputs.get("group_size") == BLOCK:
            return "block", "group"
    elif of_weights in ("tensor", "channel"):
        if of_inputs == "tensor" and not dynamic:
            return of_weights, "static"
        if of_inputs in ("tensor", "token") and dynamic:
            return of_weights, "token"
    raise ValueError(
        f"{where}: weights by {of_weights!r} with {'dynamic' if dynamic else 'static'} inputs by {of_inputs!r} are "
        f"not supported; {SUPPORTED}, with inputs by tensor or token, or for blocks by dynamic groups of {BLOCK}"
    )


def _check_block(name: str, value: Any) -> None:
    if value != [BLOCK, BLOCK]:
        raise ValueError(f"{name} {value!r} is not supported; supported: [{BLOCK}, {BLOCK}]")


def _strings(config: dict[str, Any], key: str) -> tuple[str, ...]:
    names = config.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"quantization_config: {key} must be a list of names, not {names!r}")
    for name in names:
        if name.startswith(_PATTERN):
            try:
                re.compile(name[len(_PATTERN) :])
            except re.error as error:
                raise ValueError(f"quantization_config: {key} has {name!r}, an invalid pattern: {error}") from error
    return tuple(names)


def _ends(module: str) -> list[str]:
    """Returns the module's name and what is before or after one of its dots."""
    dots = [index for index, character in enumerate(module) if character == "."]
    return [module, *(module[:dot] for dot in dots), *(module[dot + 1 :] for dot in dots)]
