"""Why a cluster cannot start or go on."""

import contextlib
from collections.abc import Iterator


class ClusterError(Exception):
    """The cluster cannot start or go on; the message is for the person who started it."""


class ConfigurationError(ClusterError):
    """It cannot start as configured: the person who started it can put that right."""


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Errors within it are what the person who started the cluster can put right."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ConfigurationError(str(error)) from error
