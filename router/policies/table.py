"""The routing policies by their names in a configuration (`routing`)."""

from typing import TYPE_CHECKING

from tandem.choices import Choices

if TYPE_CHECKING:
    from router.policies.base import RoutingPolicy

LEAST_COST = "least_cost"

ROUTING_POLICIES: "Choices[RoutingPolicy]" = Choices(
    "router.policies.base:RoutingPolicy",
    {
        "round_robin": "router.policies.round_robin:RoundRobin",
        "least_loaded": "router.policies.least_loaded:LeastLoaded",
        "power_of_two": "router.policies.power_of_two:PowerOfTwo",
        "cache_aware": "router.policies.cache_aware:CacheAware",
        LEAST_COST: "router.policies.least_cost:LeastCost",
    },
)
