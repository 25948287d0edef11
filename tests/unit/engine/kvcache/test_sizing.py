"""Number of pages in a GPU's pool, from measured figures."""

from dataclasses import replace

import pytest

from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.kvcache.sizing import CONTEXT_BYTES, GIB, DeviceMemory, choose_num_pages

# 2 MiB per page.
LAYOUT = KvHeadLayout(num_layers=32, page_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
MEMORY = DeviceMemory(total=140 * GIB, free=123 * GIB, weights=16 * GIB, graphs=GIB, forward=2 * GIB)
PAGES_PER_GIB = GIB // LAYOUT.page_bytes


def automatic(memory: DeviceMemory, fraction: float, max_model_len: int = 0) -> int:
    return choose_num_pages(memory, LAYOUT, 0, fraction, max_model_len)


def test_weights_graphs_and_pool_share_the_fraction() -> None:
    # Of 70 GiB, weights and graphs take 17; one page is the dummy.
    assert automatic(MEMORY, 0.5) == 53 * PAGES_PER_GIB - 1


def test_forward_has_room_at_any_fraction() -> None:
    assert automatic(MEMORY, 0.99) == 120 * PAGES_PER_GIB - 1
    assert automatic(replace(MEMORY, forward=20 * GIB), 0.99) == 102 * PAGES_PER_GIB - 1
    # If the fraction is the limit, a forward pass uses the remaining memory.
    assert automatic(replace(MEMORY, forward=20 * GIB), 0.5) == automatic(MEMORY, 0.5)


def test_memory_of_other_processes_is_left_alone() -> None:
    assert automatic(replace(MEMORY, free=33 * GIB), 0.88) == 30 * PAGES_PER_GIB - 1


def test_fraction_without_room_is_refused_with_figures() -> None:
    with pytest.raises(ValueError) as refused:
        automatic(MEMORY, 0.1)
    message = str(refused.value)
    assert message.startswith("there is room for 0 pages of KV (0 tokens), but a sequence may have 1: ")
    for part in (
        "the GPU has 140.0 GiB, 123.0 free after 16.0 for weights and workspaces",
        "CUDA graphs need 1.0, the largest forward pass 2.0",
        "mem_fraction_static 0.1 allows 14.0",
        "use a larger mem_fraction_static",
    ):
        assert part in message
    # The weights alone exceed the fraction.
    assert "max_model_len" not in message and "chunk_size" not in message
    with pytest.raises(ValueError, match=r"use .*, a smaller chunk_size or max_batch_size, or a smaller model$"):
        automatic(MEMORY, 0.12, 1)
    with pytest.raises(ValueError, match=r"use a smaller model, or stop other processes on this GPU$"):
        automatic(replace(MEMORY, free=0), 0.88, 1)


def test_a_pool_must_hold_the_longest_sequence() -> None:
    holds = 3 * PAGES_PER_GIB - 1
    share = 20 / 140
    assert automatic(MEMORY, share, holds * 16) == holds
    with pytest.raises(ValueError, match=f"a max_model_len of at most {holds * 16}"):
        automatic(MEMORY, share, holds * 16 + 1)


def test_larger_fraction_is_not_advised_when_others_use_the_memory() -> None:
    with pytest.raises(ValueError) as refused:
        automatic(replace(MEMORY, free=4 * GIB), 0.88, 131072)
    assert str(refused.value).endswith(
        "use a max_model_len of at most 8176, or a smaller model, or stop other processes on this GPU"
    )


def test_requested_page_count_is_limited_only_by_memory() -> None:
    most = 120 * PAGES_PER_GIB - 1
    assert choose_num_pages(MEMORY, LAYOUT, most, 0.1, 10**9) == most
    with pytest.raises(ValueError, match=rf"need 120\.0 GiB, but there is room for 120\.0: .*at most {most}"):
        choose_num_pages(MEMORY, LAYOUT, most + 1, 0.88, 0)
    with pytest.raises(ValueError, match=r"there is room for 0\.0: .*use a smaller model or a larger GPU"):
        choose_num_pages(replace(MEMORY, free=GIB), LAYOUT, 1, 0.88, 0)


@pytest.mark.parametrize("num_workers", [2, 3, 4])
@pytest.mark.parametrize("forward", [GIB, 9 * GIB])
@pytest.mark.parametrize("fraction", [0.5, 0.88, 0.99])
def test_workers_of_one_gpu_fit_together(num_workers: int, forward: int, fraction: float) -> None:
    """Each measures beside the earlier ones, forward passes of which keep their memory."""
    total = 140 * GIB
    free, pools = total, []
    for number in range(num_workers):
        free -= CONTEXT_BYTES
        # The first is a prefill worker, without decode graphs.
        memory = DeviceMemory(total, free - 16 * GIB, 16 * GIB, GIB if number else 0, forward, num_workers)
        num_pages = automatic(memory, fraction)
        pools.append(num_pages)
        free = memory.free - memory.graphs - (num_pages + 1) * LAYOUT.page_bytes - forward
        taken = memory.weights + memory.graphs + (num_pages + 1) * LAYOUT.page_bytes
        assert taken <= fraction * memory.share and taken + forward <= memory.share
    assert free >= 0
    # The order gives nobody more.
    assert pools[0] == pools[1] + PAGES_PER_GIB and len(set(pools[1:])) == 1


def test_a_share_without_room_names_the_option() -> None:
    crowded = DeviceMemory(80 * GIB, free=39 * GIB, weights=16 * GIB, graphs=GIB, forward=2 * GIB, num_workers=4)
    with pytest.raises(ValueError, match=r"each of 4 workers on the GPU has 19\.4 GiB.*or a smaller workers_per_gpu$"):
        automatic(crowded, 0.88, 131072)
    assert "other processes" not in str(crowded)


def test_a_requested_page_count_may_exceed_the_share() -> None:
    shared = replace(MEMORY, num_workers=2)
    most = 120 * PAGES_PER_GIB - 1
    assert automatic(shared, 0.88) < most == choose_num_pages(shared, LAYOUT, most, 0.88, 0)
