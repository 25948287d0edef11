"""Policies by the names that a configuration uses (tandem.config.PREFILL_POLICIES)."""

from prefill_worker.policies.base import PrefillPolicy
from prefill_worker.policies.cache_aware import DfsWeight, LongestPrefixMatch
from prefill_worker.policies.simple import FirstComeFirstServed, LongestOutputFirst, RandomOrder


def make_policy(name: str) -> PrefillPolicy:
    match name:
        case "fcfs":
            return FirstComeFirstServed()
        case "lpm":
            return LongestPrefixMatch()
        case "dfs-weight":
            return DfsWeight()
        case "lof":
            return LongestOutputFirst()
        case "random":
            return RandomOrder()
    raise ValueError(f"unknown prefill policy {name!r}")
