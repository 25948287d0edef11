"""Number of pages of a GPU's pool. Imports no torch."""

from dataclasses import dataclass

from tandem.engine.kvcache.base import PageLayout

GIB = 2**30
# CUDA's context of one process: 0.5 GiB on an H100 and on an H200.
CONTEXT_BYTES = int(0.6 * GIB)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """GPU memory in bytes, after weights are loaded and before the pool is allocated.

    Attributes:
        weights: weights, workspaces and libraries of this engine.
        forward: peak memory of the largest forward pass.
        num_workers: workers that share the device.
    """

    total: int
    free: int
    weights: int
    graphs: int
    forward: int
    num_workers: int = 1

    @property
    def share(self) -> int:
        """This worker's share of the device. Shares leave each other worker its context."""
        if self.num_workers == 1:
            return self.total
        return max(0, self.total // self.num_workers - CONTEXT_BYTES)

    @property
    def room(self) -> int:
        return max(0, self.free - self.graphs - self.forward)

    def room_within(self, fraction: float) -> int:
        """Memory for a pool if weights, graphs and pool take at most this fraction of the share, which also holds the
        largest forward pass."""
        static = min(int(self.share * fraction), self.share - self.forward)
        return max(0, min(self.room, static - self.weights - self.graphs))

    @property
    def _whose(self) -> str:
        return "the GPU has" if self.num_workers == 1 else f"each of {self.num_workers} workers on the GPU has"

    def __str__(self) -> str:
        return (
            f"{self._whose} {self.share / GIB:.1f} GiB, {self.free / GIB:.1f} free after {self.weights / GIB:.1f} for "
            f"weights and workspaces; CUDA graphs need {self.graphs / GIB:.1f}, the largest forward pass "
            f"{self.forward / GIB:.1f}"
        )


def choose_num_pages(
    memory: DeviceMemory, layout: PageLayout, num_pages: int, fraction: float, max_model_len: int
) -> int:
    """Returns the number of pages of a GPU's pool, without the dummy page.

    Args:
        num_pages: configured number; 0: as many as fit into `fraction` of the share, with weights and graphs.
        max_model_len: tokens that the pool must hold, if num_pages is 0.

    Raises:
        ValueError: the pages do not fit; the message suggests changes.
    """
    if num_pages:
        needed, most = (num_pages + 1) * layout.page_bytes, memory.room // layout.page_bytes - 1
        if num_pages > most:
            change = f"use a num_pages of at most {most}" if most > 0 else "use a smaller model or a larger GPU"
            raise ValueError(
                f"{num_pages} pages of {layout.page_bytes} bytes need {needed / GIB:.1f} GiB, but there is room for "
                f"{memory.room / GIB:.1f}: {memory}; {change}"
            )
        return num_pages
    room = memory.room_within(fraction)
    most = max(0, room // layout.page_bytes - 1)
    longest = max_model_len or 1
    needed = layout.num_pages_for(longest)
    if most < needed:
        advice = []
        if room < memory.room:
            advice.append("a larger mem_fraction_static, an explicit num_pages (not limited by it)")
        if most:
            advice.append(f"a max_model_len of at most {most * layout.page_size}")
        # Graphs and forward passes shrink with smaller batches and chunks.
        beside_weights = min(memory.free, int(memory.share * fraction) - memory.weights)
        if beside_weights // layout.page_bytes > needed:
            advice.append("a smaller chunk_size or max_batch_size")
        advice.append("or a smaller model" if advice else "a smaller model")
        if memory.num_workers > 1:
            advice.append("or a smaller workers_per_gpu")
        of_others = memory.total - memory.free - memory.weights
        if memory.num_workers == 1 and room == memory.room and of_others >= (needed - most) * layout.page_bytes:
            advice.append("or stop other processes on this GPU")
        raise ValueError(
            f"there is room for {most} pages of KV ({most * layout.page_size} tokens), but a sequence may have "
            f"{longest}: {memory}; mem_fraction_static {fraction:g} allows {memory.share * fraction / GIB:.1f}; "
            f"use {', '.join(advice)}"
        )
    return most
