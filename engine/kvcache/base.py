"""The layout of pages, which the engine and every KV transport share."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

# Bytes per element of the dtypes a pool can have, by torch's names.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class PageLayout:
    """A page-major pool is (num_pages, num_layers, 2, page_size, num_kv_heads, head_dim); index 2 is keys, values.

    One page is therefore one contiguous piece of memory, and a transfer needs no gather per layer.
    """

    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        for name in ("num_layers", "page_size", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def page_bytes(self) -> int:
        return self.num_layers * 2 * self.page_size * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)


def available_memory_bytes() -> int:
    """Memory of this host, or of the container, that a new allocation could get; the kernel's own caches give way."""
    fields = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, rest = line.partition(":")
        fields[key] = int(rest.split()[0]) * 1024
    available = fields["MemAvailable"]
    # A container's limit (cgroup 2) counts where it is below the host's.
    with suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        available = min(available, limit - used)
    return max(0, available)


class Completion(Protocol):
    """Something under way that has page numbers in hand: a forward, a copy that reads pages, one that writes them."""

    def done(self) -> bool:
        """Whether it is over. Once True, always True; never blocks."""
        ...
