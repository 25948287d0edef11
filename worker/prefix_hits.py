from tandem.messages import NO_HITS, TierHits


class PrefixHits:
    """Counts the prompt tokens found cached by one scheduler, and those among them that prefetches loaded."""

    def __init__(self) -> None:
        self.num_cached = 0
        self.loaded = NO_HITS

    def add(self, cached_len: int, prompt_len: int, prefetched: TierHits) -> TierHits:
        """Counts a request whose pages are locked.

        Args:
            cached_len: its cached tokens; more than `prompt_len` if earlier attempts' output is cached too.
            prefetched: hits of its prefetch, whose last pages may be evicted again.

        Returns:
            The prefetch's hits among the cached tokens.
        """
        loaded = prefetched.within(cached_len)
        self.num_cached += min(cached_len, prompt_len)
        self.loaded = self.loaded.plus(loaded.in_prompt(cached_len, prompt_len))
        return loaded
