"""Log files and levels of a cluster's processes."""

import logging
from pathlib import Path

from tandem.config import LogConfig

FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"


def log_file(directory: str, name: str) -> Path:
    return Path(directory) / f"{name}.log"


def configure(name: str, log: LogConfig) -> None:
    """Log to standard error or, with a directory, append to DIRECTORY/NAME.log.

    Raises:
        ValueError: the file cannot be written.
    """
    level = getattr(logging, log.level.upper())
    handler: logging.Handler = logging.StreamHandler()
    if log.directory:
        path = log_file(log.directory, name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handler = logging.FileHandler(path, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot write the log {path}: {error.strerror}; choose another log_dir") from error
    logging.basicConfig(level=max(level, logging.INFO), format=FORMAT, handlers=[handler], force=True)
    # Debug lines of libraries would bury the cluster's.
    logging.getLogger("tandem").setLevel(level)
