"""The signals of a process that takes part in Ray stay what it made of them.

Ray's own handlers of SIGTERM end the process where it stands, with a status of their own and a stack of C++ calls.
Whoever stops a start would get that.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from tandem.deploy.on_ray.bare_node import replaced


@contextlib.contextmanager
def own_signals(utils: Any, constants: Any) -> Iterator[None]:
    """Whoever calls ray.init within it keeps its handlers; the processes that Ray starts have theirs as ever.

    Args: utils, constants: Ray's modules of about these names.
    """
    with contextlib.ExitStack() as changes:
        if hasattr(utils, "set_sigterm_handler"):
            changes.enter_context(replaced(utils, "set_sigterm_handler", lambda handler: None))
        if hasattr(constants, "RAY_DISABLE_FAILURE_SIGNAL_HANDLER"):
            changes.enter_context(replaced(constants, "RAY_DISABLE_FAILURE_SIGNAL_HANDLER", True))
        yield
