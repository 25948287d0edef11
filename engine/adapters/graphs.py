"""CUDA graphs of batches with adapters and without."""

from collections.abc import Callable

from tandem.engine.adapters.ops import AdapterBatch
from tandem.engine.adapters.rows import Int32s
from tandem.engine.adapters.slots import GraphedAdapters
from tandem.engine.graph_capture import GraphCapture
from tandem.engine.models.base import Model


class AdaptedGraph:
    """A graph for batches without adapters and, with slots, one for all others, over the same inputs and outputs."""

    def __init__(
        self,
        capture: GraphCapture,
        run: Callable[[Model, AdapterBatch | None], None],
        model: Model,
        adapters: GraphedAdapters | None,
    ) -> None:
        """Args: run: a forward pass of `model`, or of its first layer."""
        shallow = model.shallow()
        self._plain = capture.capture(lambda: run(model, None), lambda: run(shallow, None))
        self._adapters = adapters
        if adapters is not None:
            batch = adapters.batch
            self._adapted = capture.capture(lambda: run(model, batch), lambda: run(shallow, batch))

    def replay(self, slots: tuple[Int32s, Int32s] | None) -> None:
        """Args: slots: as of GraphedAdapters.stage; None: the batch has no adapters."""
        if slots is None:
            self._plain.replay()
        else:
            assert self._adapters is not None
            self._adapters.stage(*slots)
            self._adapted.replay()
