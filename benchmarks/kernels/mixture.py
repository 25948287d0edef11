"""Times the mixture of experts of a layer, and its kernels by name. Needs CUDA."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from benchmarks.kernels.device_trace import read_trace
from benchmarks.kernels.stages import Measured, mixture_stages
from benchmarks.kernels.steps import profile
from tandem.engine.floors import Limits
from tandem.engine.layers.norm import Norm
from tandem.engine.layers.ops import LayerOps
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.linears import Linears
from tandem.engine.models.mlp.sparse import SparseMlp
from tandem.engine.weights.loader import dummy_weights

# Minimum size of all touched experts together, so that no cache holds them.
MIN_BYTES = 2**28
MAX_NAME = 60


class MixtureKernels:
    """Layers with random weights, whose tokens choose experts about evenly.

    Args:
        time: returns the microseconds of one layer, of a function that launches a number of layers.
    """

    def __init__(
        self,
        model: ModelConfig,
        limits: Limits,
        ops: LayerOps,
        device: torch.device,
        time: Callable[[Callable[[], object], int], float],
    ) -> None:
        self._model = model
        self._limits = limits
        self._ops = ops
        self._device = device
        self._time = time
        self._sparse = [layer for layer in range(model.num_layers) if model.is_sparse(layer)]
        self._layers: list[SparseMlp] = []

    def rows(self, hidden: torch.Tensor, norm: Norm) -> Iterator[Measured]:
        """Yields the whole mixture, the floors of its products, and its kernels, longest first.

        Args:
            hidden: (num_tokens, hidden_size); overwritten.
        """
        stages = list(mixture_stages(self._model, len(hidden)))
        layers = self._enough_layers(sum(stage.num_bytes for stage in stages))

        def run() -> None:
            for layer in layers:
                layer.forward(hidden, norm, self._ops)

        floors = {stage.name: stage.floor(self._limits) for stage in stages}
        yield Measured("norm, mixture of experts and residual", self._time(run, len(layers)), sum(floors.values()))
        for name, floor in floors.items():
            yield Measured(f"  {name}", None, floor, is_part=True)
        for name, time in self._kernel_times(run):
            yield Measured(f"  kernel {name}", time / len(layers), None, is_part=True)

    def _enough_layers(self, touched_bytes: float) -> list[SparseMlp]:
        """Args: touched_bytes: of one layer."""
        count = min(len(self._sparse), max(2, round(MIN_BYTES / touched_bytes) + 1))
        for layer in self._sparse[len(self._layers) : count]:
            self._layers.append(self._layer(layer))
        return self._layers[:count]

    def _layer(self, index: int) -> SparseMlp:
        layer = SparseMlp(Linears(self._model, index, torch.bfloat16, self._device))
        parameters = dict(layer.stacked_parameters())
        shapes = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in parameters.items()]
        for name, tensor in dummy_weights(shapes, seed=index, device=self._device):
            parameters[name].copy_(tensor)
        layer.loaded()
        return layer

    def _kernel_times(self, run: Callable[[], None]) -> list[tuple[str, float]]:
        """Returns microseconds of one run by name, longest first."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "mixture.json"
            profile([ProfilerActivity.CUDA], path, run)
            events = read_trace(path)
        times: dict[str, float] = {}
        for event in events:
            name = event.name.removeprefix("void ")[:MAX_NAME]
            times[name] = times.get(name, 0.0) + event.end - event.start
        return sorted(times.items(), key=lambda item: -item[1])
