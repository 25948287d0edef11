"""Scales of quantized keys and values. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvScales:
    """A number is its page's content times its layer's scale. Scales are (num_layers,), each above 0."""

    keys: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def ones(cls, num_layers: int) -> "KvScales":
        return cls((1.0,) * num_layers, (1.0,) * num_layers)

    @property
    def are_ones(self) -> bool:
        return set(self.keys) | set(self.values) == {1.0}
