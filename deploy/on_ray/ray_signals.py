"""Keeps this process's signal handlers. Ray's SIGTERM handlers end the process at once, with a C++ stack trace."""

import contextlib
from collections.abc import Iterator
from typing import Any

from tandem.deploy.on_ray.bare_node import replaced


@contextlib.contextmanager
def own_signals(utils: Any, constants: Any) -> Iterator[None]:
    """Inside this context ray.init installs no handlers in this process. Args: utils, constants: Ray's modules."""
    with contextlib.ExitStack() as changes:
        if hasattr(utils, "set_sigterm_handler"):
            changes.enter_context(replaced(utils, "set_sigterm_handler", lambda handler: None))
        if hasattr(constants, "RAY_DISABLE_FAILURE_SIGNAL_HANDLER"):
            changes.enter_context(replaced(constants, "RAY_DISABLE_FAILURE_SIGNAL_HANDLER", True))
        yield
