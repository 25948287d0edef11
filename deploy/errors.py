"""Errors of a cluster, with messages for the person who started it."""

import contextlib
from collections.abc import Iterator


class ClusterError(Exception):
    """The cluster cannot start or go on."""


class ConfigurationError(ClusterError):
    """The cluster cannot start as configured."""


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turns ValueError and OSError into ConfigurationError."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ConfigurationError(str(error)) from error
