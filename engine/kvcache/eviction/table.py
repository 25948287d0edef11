from typing import TYPE_CHECKING

from tandem.choices import Choices

if TYPE_CHECKING:
    from tandem.engine.kvcache.eviction.base import EvictionPolicy

EVICTION_POLICIES: "Choices[EvictionPolicy]" = Choices(
    "tandem.engine.kvcache.eviction.base:EvictionPolicy",
    {
        "lru": "tandem.engine.kvcache.eviction.recency:LeastRecentlyUsed",
        "lfu": "tandem.engine.kvcache.eviction.frequency:LeastFrequentlyUsed",
        "fifo": "tandem.engine.kvcache.eviction.age:FirstInFirstOut",
        "mru": "tandem.engine.kvcache.eviction.recency:MostRecentlyUsed",
        "priority": "tandem.engine.kvcache.eviction.priority:LowestPriority",
    },
)
