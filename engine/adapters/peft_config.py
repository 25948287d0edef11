"""Reads a PEFT adapter's configuration. Imports no torch."""

import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.engine.adapters.base import AdapterError

CONFIG_FILE = "adapter_config.json"
# PEFT's own have a few thousand.
MAX_CONFIG_BYTES = 2**20
# Settings that change nothing at inference, or that tensors show.
_IGNORED = frozenset(
    (
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    )
)
_READ = frozenset(("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"))
# Settings with a reason of their own; all others that are not known must be absent, null, false or empty.
_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA is not supported",
    "modules_to_save": "whole modules trained beside the adapter are not supported",
    "trainable_token_indices": "trained embeddings are not supported",
    "lora_bias": "biases of an adapter are not supported",
    "fan_in_fan_out": "transposed matrices are not supported",
}
# They move a part of the base's weights into the adapter, unless it is converted when saved.
_CHANGING_BASE = ("corda", "lora_ga", "olora", "pissa")
_PATTERN = re.compile(r"\^?[A-Za-z0-9_.]+")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """
    Attributes:
        targets: names, or ends of names, of modules; empty if a pattern gives them.
        whole: True if every layer has every target.
        ranks, alphas: exceptions, by name or end of a name.
    """

    base_model: str
    rank: int
    alpha: float
    is_rank_stabilized: bool
    targets: tuple[str, ...]
    whole: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        return next((rank for pattern, rank in self.ranks.items() if _fits(pattern, module)), self.rank)

    def scale_of(self, module: str) -> float:
        """Returns the factor of the module's product B A."""
        alpha = next((alpha for pattern, alpha in self.alphas.items() if _fits(pattern, module)), self.alpha)
        rank = self.rank_of(module)
        return float(alpha / (rank**0.5 if self.is_rank_stabilized else rank))

    @classmethod
    def read(cls, path: Path) -> "PeftConfig":
        """
        Args:
            path: directory of the adapter.

        Raises:
            AdapterError: adapter_config.json cannot be read or has an unsupported setting.
        """
        file = path / CONFIG_FILE
        try:
            with file.open("rb") as opened:
                content = opened.read(MAX_CONFIG_BYTES + 1)
        except OSError as error:
            raise AdapterError(f"cannot read {file}: {error.strerror}") from error
        if len(content) > MAX_CONFIG_BYTES:
            raise AdapterError(f"{file} has more than {MAX_CONFIG_BYTES} bytes")
        try:
            raw = json.loads(content.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise AdapterError(f"{file} is not valid JSON: {' '.join(str(error).split())}") from error
        try:
            return cls._of(raw)
        except AdapterError as error:
            raise AdapterError(f"{file}: {error}") from error

    @classmethod
    def _of(cls, raw: Any) -> "PeftConfig":
        if not isinstance(raw, dict):
            raise AdapterError(f"it must be an object, not {_SHORT.repr(raw)}")
        if raw.get("peft_type") != "LORA":
            raise AdapterError(f"peft_type must be LORA, not {_SHORT.repr(raw.get('peft_type'))}")
        _refuse_unsupported(raw)
        targets = raw.get("target_modules")
        is_list = isinstance(targets, list) and all(isinstance(target, str) for target in targets)
        if targets is not None and not is_list and not isinstance(targets, str):
            raise AdapterError(f"target_modules must be names or a pattern, not {_SHORT.repr(targets)}")
        alpha = raw.get("lora_alpha", 8)
        return cls(
            base_model=str(raw.get("base_model_name_or_path") or ""),
            rank=_rank("r", raw.get("r", 8)),
            alpha=_alpha("lora_alpha", alpha),
            is_rank_stabilized=bool(raw.get("use_rslora", False)),
            targets=tuple(targets) if isinstance(targets, list) else (),
            whole=is_list and not any(raw.get(key) for key in ("layers_to_transform", "exclude_modules")),
            ranks={pattern: _rank("rank_pattern", rank) for pattern, rank in _patterns(raw, "rank_pattern")},
            alphas={pattern: _alpha("alpha_pattern", alpha) for pattern, alpha in _patterns(raw, "alpha_pattern")},
        )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("bias", "none") != "none":
        raise AdapterError(f"bias must be none, not {_SHORT.repr(raw['bias'])}: biases of an adapter are not supported")
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGING_BASE):
        raise AdapterError(
            f"init_lora_weights {_SHORT.repr(start)} changes the base's weights: save the adapter with "
            "path_initial_model_for_weight_conversion"
        )
    for key, value in raw.items():
        if not value or key in _IGNORED or key in _READ or key == "bias" or _is_unused(key, raw):
            continue
        why = _REFUSED.get(key, "this setting is not supported")
        raise AdapterError(f"{_SHORT.repr(key)} is {_SHORT.repr(value)}: {why}")


def _is_unused(key: str, raw: Mapping[str, Any]) -> bool:
    """Settings of a way to begin the training count only there."""
    return key in ("corda_config", "lora_ga_config", "qalora_group_size") and not raw.get("use_qalora")


def _patterns(raw: Mapping[str, Any], key: str) -> list[tuple[str, Any]]:
    patterns = raw.get(key) or {}
    if not isinstance(patterns, dict):
        raise AdapterError(f"{key} must be an object, not {_SHORT.repr(patterns)}")
    for pattern in patterns:
        if _PATTERN.fullmatch(pattern) is None:
            raise AdapterError(f"{key} has {_SHORT.repr(pattern)}: write module names instead of regular expressions")
    return list(patterns.items())


def _fits(pattern: str, module: str) -> bool:
    if pattern.startswith("^"):
        return module == pattern[1:]
    return module == pattern or module.endswith(f".{pattern}")


def _rank(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise AdapterError(f"{name} must be a whole number of at least 1, not {_SHORT.repr(value)}")
    return value


def _alpha(name: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) < 1e9:
        raise AdapterError(f"{name} must be a number, not {_SHORT.repr(value)}")
    return float(value)
