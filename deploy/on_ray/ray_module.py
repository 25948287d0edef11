"""Imports Ray, after setting the variables that Ray reads on import. No other module imports Ray."""

import os
from collections.abc import Callable

from tandem.logs import MAX_BYTES, NUM_OLDER

os.environ.update(
    {
        "RAY_AUTH_MODE": "token",
        # Despite its name, this makes Ray listen on loopback only.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        # The default port would be the same for every cluster.
        "AUTOSCALER_METRIC_PORT": "0",
    }
)
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray's default, nice 15, would let other programs delay every token.
os.environ.setdefault("RAY_worker_niceness", "0")
# Ray's node connects to its object store a moment too early, and by default retries only after a second.
os.environ.setdefault("RAY_raylet_client_connect_timeout_milliseconds", "20")
os.environ.setdefault("RAY_raylet_client_num_connect_attempts", "500")
# By default Ray rotates its own logs at 512 MiB, and the output of processes never.
os.environ.setdefault("RAY_ROTATION_MAX_BYTES", str(MAX_BYTES))
os.environ.setdefault("RAY_ROTATION_BACKUP_COUNT", str(NUM_OLDER))
# Records of calls and dead actors, kept for a dashboard: by default 100,000 of each fill Ray's memory.
os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
os.environ.setdefault("RAY_maximum_gcs_destroyed_actor_cached_count", "1000")

import ray
from ray._private import node, ray_constants, services, state, utils
from ray._private import worker as ray_worker
from ray._raylet import PlacementGroupID
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply  # type: ignore[attr-defined]
from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.experimental import internal_kv
from ray.util import list_named_actors
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

__all__ = [
    "FIRST_VERSION",
    "ActorTableData",
    "ActorUnavailableError",
    "GetClusterStatusReply",
    "NodeAffinitySchedulingStrategy",
    "PlacementGroup",
    "PlacementGroupID",
    "PlacementGroupSchedulingStrategy",
    "RayActorError",
    "RayError",
    "RayTaskError",
    "internal_kv",
    "list_named_actors",
    "node",
    "placement_group",
    "placement_group_table",
    "ray",
    "ray_constants",
    "ray_worker",
    "remove_placement_group",
    "services",
    "settings_reset",
    "state",
    "utils",
]

FIRST_VERSION = "2.52"


def settings_reset() -> Callable[[], None]:
    """Returns a function that makes Ray read its settings and token again. Raises ValueError: Ray has no tokens."""
    try:
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

        forget_token = AuthenticationTokenLoader.instance().reset_cache
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"Ray {ray.__version__} knows no token authentication, so any user of this host could run code here; "
            f"install ray>={FIRST_VERSION}"
        ) from error

    def reset() -> None:
        Config.initialize("")
        forget_token()

    return reset
