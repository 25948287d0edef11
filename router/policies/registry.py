"""Policies by the names that a configuration uses (tandem.config.ROUTING_POLICIES)."""

from router.policies.base import Policy
from router.policies.cache_aware import CacheAware
from router.policies.least_loaded import LeastLoaded
from router.policies.power_of_two import PowerOfTwo
from router.policies.round_robin import RoundRobin


def make_policy(name: str) -> Policy:
    match name:
        case "round_robin":
            return RoundRobin()
        case "least_loaded":
            return LeastLoaded()
        case "power_of_two":
            return PowerOfTwo()
        case "cache_aware":
            return CacheAware()
    raise ValueError(f"unknown routing policy {name!r}")
