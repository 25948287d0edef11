"""The eviction policies by their names in a configuration (`eviction`)."""

from typing import TYPE_CHECKING

from tandem.choices import Choices

if TYPE_CHECKING:
    from engine.kvcache.eviction.base import EvictionPolicy

EVICTION_POLICIES: "Choices[EvictionPolicy]" = Choices(
    "engine.kvcache.eviction.base:EvictionPolicy",
    {
        "lru": "engine.kvcache.eviction.recency:LeastRecentlyUsed",
        "lfu": "engine.kvcache.eviction.frequency:LeastFrequentlyUsed",
        "fifo": "engine.kvcache.eviction.age:FirstInFirstOut",
        "mru": "engine.kvcache.eviction.recency:MostRecentlyUsed",
        "priority": "engine.kvcache.eviction.priority:LowestPriority",
    },
)
