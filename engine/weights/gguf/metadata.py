"""Reads the keys of a GGUF file that begin with its architecture's name."""

import math
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

# Above every size and length of a model.
MAX_NUMBER = 2**31


class ModelMetadata:
    """Every error is a ValueError that names the key."""

    def __init__(self, raw: Mapping[str, Any], architecture: str) -> None:
        self.raw = raw
        self.architecture = architecture

    def has(self, name: str) -> bool:
        return self.key(name) in self.raw

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.raw.get(self.key(name), default)
        # type(): bool is an int in Python. A list means sizes that differ between layers.
        if type(value) is not int or not least <= value < MAX_NUMBER:
            least_said = "a positive integer" if least else "an integer of at least 0,"
            raise ValueError(f"{self.key(name)} must be {least_said} below {MAX_NUMBER}, got {reprlib.repr(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(self.key(name), default)
        if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
            raise ValueError(f"{self.key(name)} must be a number above 0, got {reprlib.repr(value)}")
        # GGUF keeps float32. Its shortest form is the model author's number: 1e-05, not 9.99999974e-06.
        return float(str(np.float32(value)))

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(self.key(name), default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.key(name)} must be true or false, got {reprlib.repr(value)}")
        return value

    def refuse_other(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
        """Raises ValueError if a key is there with a value that is not neutral."""
        for name, values in neutral.items():
            if self.has(name) and (value := self.raw[self.key(name)]) not in values:
                raise ValueError(f"{self.key(name)} = {reprlib.repr(value)} is not supported")

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"
