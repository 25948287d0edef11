"""Copies of some heads between pages of different formats, within one GPU."""

import pytest
import torch

from tandem.engine.attention.layout import KvHeadLayout
from tandem.kvtransfer.lanes.plan import lane_parts, plan_lanes

NUM_PAGES = 12
SOURCES, DESTINATIONS = [3, 0, 11, 5], [1, 10, 0, 7]


# Words of 16, 8, 4, 2 and 1 bytes.
@pytest.mark.parametrize(("head_dim", "quantized_to"), [(64, ""), (4, ""), (2, ""), (1, ""), (3, "float8_e4m3fn")])
@pytest.mark.parametrize("degrees", [(1, 2), (4, 2), (2, 8), (8, 1)])
def test_heads_arrive_at_their_places_and_nothing_else_changes(
    degrees: tuple[int, int], head_dim: int, quantized_to: str
) -> None:
    from tandem.engine.kvcache.batched_copies import copies_between

    layout = KvHeadLayout(3, 16, num_kv_heads=4, head_dim=head_dim, dtype="bfloat16", quantized_to=quantized_to)
    senders, receivers = ([layout.shard(rank, degree) for rank in range(degree)] for degree in degrees)
    device, stream = torch.device("cuda", 0), torch.cuda.Stream()
    for lane in plan_lanes([of.heads for of in senders], [to.heads for to in receivers]):
        source, destination = lane_parts(layout, lane)
        pages = torch.randint(0, 256, (NUM_PAGES, source.page_bytes), dtype=torch.uint8, device=device)
        written = torch.randint(0, 256, (NUM_PAGES, destination.page_bytes), dtype=torch.uint8, device=device)
        expected = written.cpu().numpy()
        destination.view(expected)[DESTINATIONS] = source.view(pages.cpu().numpy())[SOURCES]
        copies = copies_between(source, destination, device)
        torch.cuda.synchronize()
        copies.copy(written.data_ptr(), DESTINATIONS, pages.data_ptr(), SOURCES, stream.cuda_stream)
        stream.synchronize()
        assert torch.equal(written.cpu(), torch.from_numpy(expected)), lane
