import math
import re
from collections.abc import Iterable, Iterator

import torch

from tandem.engine.attention.scales import KvScales

_NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:([kv])_scale|([kv])_proj\.(?:\3_scale|output_scale))")


class ScaleReader:
    """Takes the scales out of a checkpoint's tensors; the default is 1."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._found: dict[tuple[str, int], float] = {}

    def without_scales(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields all other tensors.

        Raises:
            ValueError: a scale is repeated, belongs to no layer of the model, or is not above 0; the message names its
                tensor.
        """
        for name, tensor in weights:
            match = _NAME.fullmatch(name)
            if match is None:
                yield name, tensor
                continue
            key = match[2] or match[3], int(match[1])
            if key in self._found or key[1] >= self._num_layers:
                raise ValueError(f"tensor {name} {'comes twice' if key in self._found else 'is unexpected'}")
            if tensor.numel() != 1:
                raise ValueError(f"tensor {name} has {tensor.numel()} scales; supported is one for a layer")
            scale = float(tensor)
            if not (math.isfinite(scale) and scale > 0):
                raise ValueError(f"tensor {name} is {scale}, which is no scale: it must be above 0")
            self._found[key] = scale

    def scales(self) -> KvScales:
        keys, values = (
            tuple(self._found.get((part, layer), 1.0) for layer in range(self._num_layers)) for part in "kv"
        )
        return KvScales(keys, values)
