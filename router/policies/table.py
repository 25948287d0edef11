"""Routing policies by their configuration name (`routing`)."""

from typing import TYPE_CHECKING

from tandem.choices import Choices

if TYPE_CHECKING:
    from tandem.router.policies.base import RoutingPolicy

LEAST_COST = "least_cost"

ROUTING_POLICIES: "Choices[RoutingPolicy]" = Choices(
    "tandem.router.policies.base:RoutingPolicy",
    {
        "round_robin": "tandem.router.policies.round_robin:RoundRobin",
        "least_loaded": "tandem.router.policies.least_loaded:LeastLoaded",
        "power_of_two": "tandem.router.policies.power_of_two:PowerOfTwo",
        "cache_aware": "tandem.router.policies.cache_aware:CacheAware",
        LEAST_COST: "tandem.router.policies.least_cost:LeastCost",
    },
)
