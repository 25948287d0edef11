"""What an existing Ray says about nodes to come and nodes to go."""

import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from tandem.deploy.on_ray.ray_module import GetClusterStatusReply, RayError, internal_kv, ray, state

# Ray's autoscalers report here (v1), and whether v2 runs (ray.autoscaler.v2.utils).
_REPORT = b"__autoscaling_status"
_IS_V2 = b"__autoscaler_v2_enabled"
_V2_NAMESPACE = b"__autoscaler"
# The type of a node that a Ray without an autoscaler only lists.
_LISTED = "node_"


def has_autoscaler() -> bool:
    """Returns whether the Ray of this process can add nodes, as far as it says so."""
    with contextlib.suppress(RayError, RuntimeError, ValueError):
        if internal_kv._internal_kv_get(_IS_V2, namespace=_V2_NAMESPACE) == b"1":
            reply = GetClusterStatusReply.FromString(internal_kv.internal_kv_get_gcs_client().get_cluster_status())
            types = [node.ray_node_type_name for node in reply.cluster_resource_state.node_states]
            return bool(reply.autoscaling_state.autoscaler_state_version) and any(types)
        return adds_nodes(json.loads(internal_kv._internal_kv_get(_REPORT) or b"{}"))
    return False


def adds_nodes(report: Mapping[str, Any]) -> bool:
    """Returns whether a report is one of an autoscaler that has types of nodes. Args: report: as of Ray's v1."""
    found = report.get("autoscaler_report") or {}
    types: Iterable[str] = [
        *(found.get("active_nodes") or ()),
        *(found.get("idle_nodes") or ()),
        *(found.get("pending_launches") or ()),
        *(found.get("node_type_mapping") or {}).values(),
    ]
    return any(not name.startswith(_LISTED) for name in types)


def leaving_nodes() -> dict[str, float]:
    """Returns the end, as of time.time, of each node that is announced to go, by id. 0.0: not said."""
    draining: Mapping[str, int] = state.state.get_draining_nodes()
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return {node_id: deadline_ms / 1e3 for node_id, deadline_ms in draining.items() if node_id in alive}
