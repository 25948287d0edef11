"""The adapters that a cluster starts with."""

from collections.abc import Collection
from pathlib import Path

from tandem.adapters import AdapterEntry
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.engine.config import EngineConfig
from tandem.worker.adapter_check import read_adapter


def read_adapters(
    config: ClusterConfig, engine: EngineConfig, model_names: Collection[str]
) -> tuple[AdapterEntry, ...]:
    """Reads and checks the adapters of --lora, about a second for each GB.

    Args:
        model_names: names of the served model.

    Raises:
        ValueError: one of them cannot be served.
    """
    adapters = []
    for name, path in config.adapter_paths:
        if name in model_names:
            raise ValueError(f"`lora` {name!r} is a name of the served model: choose another one")
        try:
            adapter = read_adapter(engine, Path(path).absolute())
        except ValueError as error:
            raise ValueError(f"adapter {name!r} cannot be served: {error}") from error
        # Any load or unload is later.
        adapters.append(AdapterEntry(name, 0, "", adapter))
    return tuple(adapters)
