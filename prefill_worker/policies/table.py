"""The prefill policies by their names in a configuration (`schedule`)."""

from typing import TYPE_CHECKING

from tandem.choices import Choices

if TYPE_CHECKING:
    from prefill_worker.policies.base import PrefillPolicy

PREFILL_POLICIES: "Choices[PrefillPolicy]" = Choices(
    "prefill_worker.policies.base:PrefillPolicy",
    {
        "fcfs": "prefill_worker.policies.simple:FirstComeFirstServed",
        "lpm": "prefill_worker.policies.cache_aware:LongestPrefixMatch",
        "dfs-weight": "prefill_worker.policies.cache_aware:DfsWeight",
        "lof": "prefill_worker.policies.simple:LongestOutputFirst",
        "random": "prefill_worker.policies.simple:RandomOrder",
    },
)
