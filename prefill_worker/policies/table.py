"""Prefill policies by name (`schedule`)."""

from typing import TYPE_CHECKING

from tandem.choices import Choices

if TYPE_CHECKING:
    from tandem.prefill_worker.policies.base import PrefillPolicy

PREFILL_POLICIES: "Choices[PrefillPolicy]" = Choices(
    "tandem.prefill_worker.policies.base:PrefillPolicy",
    {
        "fcfs": "tandem.prefill_worker.policies.simple:FirstComeFirstServed",
        "lpm": "tandem.prefill_worker.policies.cache_aware:LongestPrefixMatch",
        "dfs-weight": "tandem.prefill_worker.policies.cache_aware:DfsWeight",
        "lof": "tandem.prefill_worker.policies.simple:LongestOutputFirst",
        "random": "tandem.prefill_worker.policies.simple:RandomOrder",
    },
)
