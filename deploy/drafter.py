"""Finds the model that drafts, beside the model that a cluster serves."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from tandem.decode_worker.speculation import parse_speculation
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.engine.config import EngineConfig
from tandem.engine.draft_models.config import DRAFT, check_tokens, drafter_of
from tandem.engine.models.config import ModelConfig
from tandem.engine.weights.resolve import check_model_name, checkpoint_files, resolve_model

Progress = Callable[[str, float], None]


def check_drafter_name(config: ClusterConfig) -> None:
    """Checks the drafter as far as nothing needs to be fetched.

    Raises:
        ValueError: no drafter has the name, or it cannot draft for the model, and both are directories.
    """
    source, name = _named_source(config.speculation)
    if not name:
        return
    with _refusals_of(config.speculation):
        if source == DRAFT:
            check_model_name(name)
        else:
            _directory(name)
    model_dir, drafter_dir = Path(config.model).expanduser(), Path(name).expanduser()
    if model_dir.is_dir() and drafter_dir.is_dir():
        resolved = replace(config, speculation=f"{source}:{drafter_dir}")
        check_drafter(resolved.engine(str(model_dir)), ModelConfig.from_dir(model_dir))


def check_drafter(engine: EngineConfig, model: ModelConfig) -> None:
    """Raises ValueError: the engine's drafter cannot draft for its model."""
    if (drafter := drafter_of(engine, model)) is not None:
        check_tokens(drafter, Path(engine.model_dir))


def with_drafter(
    config: ClusterConfig,
    load_format: str,
    on_progress: Progress | None = None,
    held: ExitStack | None = None,
) -> ClusterConfig:
    """Returns the configuration with the drafter's directory in place of its name. Arguments as of resolve_drafter."""
    resolved = resolve_drafter(config.speculation, load_format, on_progress, held)
    return config if resolved == config.speculation else replace(config, speculation=resolved)


def resolve_drafter(
    speculation: str, load_format: str, on_progress: Progress | None = None, held: ExitStack | None = None
) -> str:
    """Returns the value of the option with the drafter's directory in place of its name.

    Args:
        load_format, on_progress, held: as of resolve_model.

    Raises:
        ValueError: the drafter cannot be found, or has no safetensors weights.
    """
    source, name = _named_source(speculation)
    if not name:
        return speculation
    with _refusals_of(speculation):
        if source == DRAFT:
            directory = resolve_model(name, load_format, on_progress=on_progress, held=held)
        else:
            directory = _directory(name)
            if load_format != "dummy":
                checkpoint_files(directory)
    return f"{source}:{directory.absolute()}"


def _named_source(speculation: str) -> tuple[str, str]:
    """Returns the source and the name of its model; ("", "") for drafts without a model of their own."""
    source, _, name = speculation.partition(":")
    return (source, name) if name and parse_speculation(speculation).is_by_model else ("", "")


def _directory(name: str) -> Path:
    directory = Path(name).expanduser()
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")
    return directory


@contextmanager
def _refusals_of(speculation: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"`speculation` {speculation} names no drafter: {error}") from error
