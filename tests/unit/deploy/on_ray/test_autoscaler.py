"""Whether a Ray has an autoscaler, from its reports."""

import pytest

from tandem.deploy.on_ray.autoscaler import adds_nodes

NODE = "node_b99b828bbd139966186aeec29ed9e9dd4a22290b9adb1af569a47f00"


@pytest.mark.parametrize(
    ("report", "adds"),
    [
        ({}, False),
        ({"autoscaler_report": None}, False),
        ({"active_nodes": {NODE: 1}, "idle_nodes": None, "node_type_mapping": {NODE[5:]: NODE}}, False),
        ({"active_nodes": {"headgroup": 1}, "idle_nodes": None, "node_type_mapping": None}, True),
        ({"active_nodes": {}, "pending_launches": {"gpu": 2}}, True),
        ({"active_nodes": {}, "idle_nodes": {"headgroup": 1}}, True),
    ],
)
def test_an_autoscaler_has_types_of_nodes(report: dict[str, object], adds: bool) -> None:
    """Without an autoscaler, each node is a type of its own."""
    whole = report if "autoscaler_report" in report else {"autoscaler_report": report}
    assert adds_nodes(whole) is adds
