"""Log files and levels of a cluster's processes."""

import logging
import logging.handlers
import sys
from pathlib import Path

from tandem.config import LogConfig

# A log that reaches this size becomes NAME.log.1, and a new one begins.
MAX_BYTES = 64 * 2**20
NUM_OLDER = 1
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
            handler = _LogFile(path, maxBytes=MAX_BYTES, backupCount=NUM_OLDER, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot write the log {path}: {error.strerror}; choose another log_dir") from error
    logging.basicConfig(level=max(level, logging.INFO), format=FORMAT, handlers=[handler], force=True)
    # Debug lines of libraries would bury the cluster's.
    logging.getLogger("tandem").setLevel(level)


class _LogFile(logging.handlers.RotatingFileHandler):
    """Reports a failed write, as on a full disk, in one line on standard error until a write succeeds."""

    _is_failing = False
    _has_failed = False

    def emit(self, record: logging.LogRecord) -> None:
        self._has_failed = False
        super().emit(record)
        self._is_failing = self._has_failed

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._has_failed = True
        if not self._is_failing:
            print(f"{record.name}: cannot write the log {self.baseFilename}: {error.strerror}", file=sys.stderr)
