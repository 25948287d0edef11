"""What keys and values are divided by before they are rounded to the narrower dtype of quantized pages. Imports no
torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvScales:
    """A number in a page stands for itself times its scale.

    Attributes:
        keys, values: (num_layers,), each above 0: one scale for all heads of a layer.
    """

    keys: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def ones(cls, num_layers: int) -> "KvScales":
        """For a model that comes without scales."""
        return cls((1.0,) * num_layers, (1.0,) * num_layers)

    @property
    def are_ones(self) -> bool:
        return set(self.keys) | set(self.values) == {1.0}
