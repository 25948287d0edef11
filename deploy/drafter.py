"""Finds the model that drafts, beside the model that a cluster serves."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tandem.decode_worker.speculation import parse_speculation
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.engine.weights.resolve import checkpoint_files, resolve_model


def with_drafter(
    config: ClusterConfig,
    load_format: str,
    on_progress: Callable[[str, float], None] | None = None,
    held: ExitStack | None = None,
) -> ClusterConfig:
    """Returns the configuration with the drafter's directory in place of its name.

    Args:
        load_format, on_progress, held: as of resolve_model.

    Raises:
        ValueError: the drafter cannot be found, or has no safetensors weights.
    """
    source, _, name = config.speculation.partition(":")
    if not name or not parse_speculation(config.speculation).is_by_model:
        return config
    if source == "draft":
        directory = resolve_model(name, load_format, on_progress=on_progress, held=held)
    else:
        directory = Path(name).expanduser()
        if not directory.is_dir():
            raise ValueError(f"speculation {config.speculation}: {directory} is not a directory")
        if load_format != "dummy":
            checkpoint_files(directory)
    return replace(config, speculation=f"{source}:{directory.absolute()}")
