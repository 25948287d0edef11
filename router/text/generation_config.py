"""Sampling defaults from a model's generation_config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.sampling_params import SamplingParams

FILE = "generation_config.json"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MAX_TOKENS = "max_new_tokens"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    plain: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None

    def __str__(self) -> str:
        values = dict(self.plain) | ({} if self.max_tokens is None else {"max_tokens": self.max_tokens})
        return ", ".join(f"{name} {value:g}" for name, value in values.items())


def read_sampling_defaults(model_dir: Path) -> SamplingDefaults:
    """Returns no defaults for a missing file. Raises ValueError for an unreadable file or an invalid value."""
    path = model_dir / FILE
    if not path.is_file():
        return SamplingDefaults()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
        values = {name: content[name] for name in (*_SAMPLING, _MAX_TOKENS) if content.get(name) is not None}
        for name, value in values.items():
            kinds = (int,) if name in ("top_k", _MAX_TOKENS) else (int, float)
            if type(value) not in kinds:
                raise ValueError(f"{name} must be a number, not {value!r}")
        max_tokens = values.pop(_MAX_TOKENS, None)
        SamplingParams(max_tokens=1 if max_tokens is None else max_tokens, **values)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}; set generation_config to none to ignore it") from error
    return SamplingDefaults(values, max_tokens)
