"""Starts a Ray node without services that a cluster on one host does not need, which saves seconds.

Ray has no options for this. A Ray without the patched attributes starts as usual.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

AliveNodes = Callable[[], Collection[str]]
# A Python process each, and Ray waits for the dashboard.
UNUSED_SERVICES = ("start_monitor", "start_api_server", "start_log_monitor")
# Ray's own interval is a second; its node starts in less.
LOOK_INTERVAL_S = 0.01
LOOK_TIMEOUT_S = 30.0


@contextlib.contextmanager
def bare_node(node_class: type, services: Any, watch_nodes: Callable[[str], AliveNodes]) -> Iterator[None]:
    """Inside this context ray.init starts such a node. Args: watch_nodes: called with the address of a GCS."""
    with contextlib.ExitStack() as changes:
        for name in UNUSED_SERVICES:
            if hasattr(node_class, name):
                changes.enter_context(replaced(node_class, name, _nothing))
        if hasattr(services, "get_node"):
            changes.enter_context(replaced(services, "get_node", _soon(services.get_node, watch_nodes)))
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, by: Any) -> Iterator[None]:
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
        # Another version of Ray may list its nodes differently.
        with contextlib.suppress(AttributeError, TypeError, LookupError):
            alive_nodes = watch_nodes(gcs_address)
            while node_id not in alive_nodes() and time.monotonic() < deadline:
                time.sleep(LOOK_INTERVAL_S)
        return get_node(gcs_address, node_id, *args, **named)

    return looked_for
