"""Ray's node without what a cluster of one host has no use for.

Ray has options for none of this. Each change is made only to a Ray that has what is changed; another starts as ever, a
few seconds later.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

# It gives the ids of the nodes that are up.
AliveNodes = Callable[[], Collection[str]]
# The autoscaler has nothing to scale, the dashboard's server shows nothing, and nobody wants the logs that the last one
# reads. Each would be a Python process that starts beside ours, and Ray waits for the dashboard's.
UNUSED_SERVICES = ("start_monitor", "start_api_server", "start_log_monitor")
# Ray looks once a second whether its node has come up, which takes a little less.
LOOK_INTERVAL_S = 0.01
LOOK_TIMEOUT_S = 30.0


@contextlib.contextmanager
def bare_node(node_class: type, services: Any, watch_nodes: Callable[[str], AliveNodes]) -> Iterator[None]:
    """Whoever calls ray.init within it gets such a node.

    Args:
        node_class: Ray's, which starts its processes.
        services: Ray's module of that name.
        watch_nodes: begins to watch the nodes of the GCS at an address.
    """
    with contextlib.ExitStack() as changes:
        for name in UNUSED_SERVICES:
            if hasattr(node_class, name):
                changes.enter_context(replaced(node_class, name, _nothing))
        if hasattr(services, "get_node"):
            changes.enter_context(replaced(services, "get_node", _soon(services.get_node, watch_nodes)))
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, by: Any) -> Iterator[None]:
    """Something of Ray's is another within it."""
    original = getattr(owner, name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _nothing(*args: object, **named: object) -> None:
    pass


def _soon(get_node: Callable[..., Any], watch_nodes: Callable[[str], AliveNodes]) -> Callable[..., Any]:
    def looked_for(gcs_address: str, node_id: str, *args: Any, **named: Any) -> Any:
        deadline = time.monotonic() + LOOK_TIMEOUT_S
        # A Ray that is asked for its nodes in another way is not looked at.
        with contextlib.suppress(AttributeError, TypeError, LookupError):
            alive_nodes = watch_nodes(gcs_address)
            while node_id not in alive_nodes() and time.monotonic() < deadline:
                time.sleep(LOOK_INTERVAL_S)
        return get_node(gcs_address, node_id, *args, **named)

    return looked_for
