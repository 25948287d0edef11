from tandem.pagestore.client.prefetch import Prefetch


class SharedLoads:
    """Lets a prefetch wait for another one that loads its next pages already."""

    def __init__(self) -> None:
        self._following: list[Prefetch] = []
        # Prefetches by the keys that they asked for.
        self._leaders: dict[bytes, Prefetch] = {}

    def lead(self, prefetch: Prefetch) -> None:
        """Offers the pages of a prefetch that has asked for them."""
        self._leaders.update(dict.fromkeys(prefetch.keys, prefetch))

    def end_lead(self, prefetch: Prefetch) -> None:
        for key in prefetch.keys:
            if self._leaders.get(key) is prefetch:
                del self._leaders[key]

    def follow(self, prefetch: Prefetch) -> bool:
        """Waits for the prefetch that loads the next pages of this one. Returns False if there is none."""
        leader = self._leaders.get(prefetch.keys[0])
        if leader is None or leader.is_over:
            return False
        places = (i for i, key in enumerate(prefetch.keys) if self._leaders.get(key) is not leader)
        shared_end = prefetch.base - leader.base + next(places, len(prefetch.keys))
        if leader.num_entered >= shared_end:
            return False
        prefetch.leader, prefetch.shared_end = leader, shared_end
        self._following.append(prefetch)
        return True

    def end_follow(self, prefetch: Prefetch) -> None:
        if prefetch in self._following:
            self._following.remove(prefetch)

    def take_free(self) -> list[Prefetch]:
        """Removes and returns prefetches whose leader has loaded the shared pages, or has ended. They begin again."""
        free = []
        for prefetch in list(self._following):
            leader = prefetch.leader
            assert leader is not None
            if leader.runs and leader.num_entered < prefetch.shared_end:
                continue
            end = leader.base + prefetch.shared_end
            prefetch.loaded |= {i: tier for i, tier in leader.loaded.items() if prefetch.base <= i < end}
            self._following.remove(prefetch)
            prefetch.restart()
            free.append(prefetch)
        return free

    def check_integrity(self) -> str:
        """Returns the first prefetch that waits or leads for nothing, or ""."""
        if any(leader.find is None for leader in self._leaders.values()):
            return "a prefetch without a find leads others"
        if any(follower.is_over or follower.runs for follower in self._following):
            return "a prefetch that follows another is over, or loads for itself"
        return ""
