"""The model of a cluster keeps account of every request, and of a queue it says what can be reckoned by hand."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.cluster_model.cluster import FIXED, WORKERS, Layout, ModelCluster, fixed
from benchmarks.cluster_model.device import H200_8B, DeviceFactors
from benchmarks.cluster_model.goodput import Duration, GoodputModel
from benchmarks.cluster_model.prefix_cache import PrefixCache
from benchmarks.cluster_model.workloads import Conversation, Stretch, Turn, Workload, conversations
from tandem.bench.records import RequestRecord
from tandem.router.workers.objectives import Objectives

# A prompt of 8,192 tokens takes 50 ms, and nothing else takes any time to speak of.
ONE_AT_A_TIME = DeviceFactors(prompt=(0.0, 50e-3 / 8192, 0.0), step=(1e-6, 0.0, 0.0), handover=(0.0, 0.0))


def run(
    layout: Layout, workload: Workload, rate: float, seconds: float, device: DeviceFactors = H200_8B
) -> tuple[ModelCluster, list[RequestRecord]]:
    cluster = ModelCluster(layout, Objectives(), device=device)
    return cluster, cluster.run(list(conversations([Stretch(workload, 0.0, seconds, rate)], seed=1)))


@pytest.mark.parametrize("layout", [*FIXED, WORKERS], ids=lambda layout: layout.name)
def test_every_request_ends_once_with_all_its_tokens_and_leaves_no_load(layout: Layout) -> None:
    workload = Workload("w", 256, 24, num_system=64, num_turns=3, think_s=0.2)
    cluster, records = run(layout, workload, rate=40.0, seconds=5.0)
    assert cluster.num_submitted == len(records) > 100
    assert set(Counter(record.index for record in records).values()) == {1}
    for record in records:
        assert len(record.times) == 24
        assert record.due_s < record.times[0]
        assert all(before < after for before, after in itertools.pairwise(record.times))
    for worker in cluster.registry:
        assert (worker.num_assigned, worker.num_pending_tokens, worker.num_decoding, worker.num_kv_tokens) == (0,) * 4


def test_one_worker_that_computes_prompts_is_a_queue_of_which_the_mean_wait_is_known() -> None:
    # Prompts fill a forward each.
    _, records = run(fixed(1, 1), Workload("w", 8192, 2), rate=10.0, seconds=150.0, device=ONE_AT_A_TIME)
    ends_at = 0.0
    for record in sorted(records, key=lambda record: record.due_s):
        ends_at = max(record.due_s, ends_at) + 50e-3
        assert record.times[0] == pytest.approx(ends_at)
    # A worker that is busy half the time has a prompt wait for 0.5 / (2 * 0.5) of its own time (Pollaczek, Khinchine).
    waits = [record.times[0] - record.due_s - 50e-3 for record in records]
    assert sum(waits) / len(waits) == pytest.approx(0.5 * 50e-3, rel=0.2)


def test_lone_requests_take_what_the_device_takes() -> None:
    device = DeviceFactors(prompt=(2e-3, 1e-5, 0.0), step=(5e-3, 1e-3, 0.0), handover=(4e-3, 1e-4))
    for layout, handover_s in ((fixed(1, 1), 4e-3 + 64 * 1e-4), (Layout("both", ("both",)), 0.0)):
        _, records = run(layout, Workload("w", 1024, 3), rate=0.1, seconds=50.0, device=device)
        for record in records:
            first, *gaps = [after - before for before, after in itertools.pairwise([record.due_s, *record.times])]
            assert first == pytest.approx(2e-3 + 1024e-5)
            assert gaps == pytest.approx([handover_s + 6e-3, 6e-3])


def test_prompts_beside_steps_are_in_one_forward_with_them_where_the_device_has_such() -> None:
    device = DeviceFactors((2e-3, 1e-5, 0.0), step=(5e-3, 1e-3, 0.0), handover=(0.0, 0.0), mixed=(6e-3, 2e-5))
    layout, alone_s, prompt = Layout("both", ("both",), chunk_size=512), 6e-3, Turn(512 + 70, 2, (), False)
    # Of both, the first piece has 512 tokens and the second one the padding of a graph of 128.
    mixed = [6e-3 + 512 * 2e-5 + 1e-3, 6e-3 + 128 * 2e-5 + 1e-3]
    apart = [2e-3 + 512e-5 + alone_s, 2e-3 + 70e-5 + alone_s + 1e-3]
    for factors, expected in ((device, [*mixed, alone_s + 1e-3]), (replace(device, mixed=None), apart)):
        cluster = ModelCluster(layout, Objectives(), device=factors)
        late = Conversation(0.1, [prompt])
        records = cluster.run([Conversation(0.0, [Turn(16, 100, (), False)]), late])
        stream = next(record for record in records if record.wanted_input_tokens == 16)
        gaps = [after - before for before, after in itertools.pairwise(stream.times)]
        longer = [gap for gap in gaps if gap > alone_s + 1e-9]
        assert longer == pytest.approx(expected)
        assert len(gaps) == 99


def test_a_turn_computes_what_its_worker_has_not_cached() -> None:
    workload = Workload("w", 160, 16, num_turns=3, think_s=1.0)
    _, records = run(Layout("both", ("both",)), workload, rate=0.5, seconds=30.0)
    # The last token of an answer is in no page: of 176 tokens 160 are.
    assert {record.wanted_input_tokens: record.cached_tokens for record in records} == {160: 0, 336: 160, 512: 336}


def test_goodput_is_the_rate_at_which_one_in_ten_is_late() -> None:
    # With a share r of its time spent, a prompt waits for no longer than it takes itself with probability
    # (1 - r) exp(r), which is 0.9 for 0.392: 7.84 prompts a second.
    model = GoodputModel(device=ONE_AT_A_TIME, duration=Duration(10.0, 110.0))
    found = model.goodput(fixed(1, 1), Workload("w", 8192, 2), Objectives(100.01e-3, 1.0))
    assert found == pytest.approx(7.84, rel=0.1)


def test_as_many_conversations_begin_as_the_rate_says() -> None:
    workload = Workload("w", 8, 2, num_turns=2)
    stretches = [Stretch(workload, 0.0, 10.0, 7.0), Stretch(workload, 10.0, 30.0, 20.0)]
    for seed in range(5):
        moments = [conversation.begins_at for conversation in conversations(stretches, seed)]
        assert moments == sorted(moments) and moments[0] > 0.0 and moments[-1] < 30.0
        assert [sum(m < 10.0 for m in moments), sum(m >= 10.0 for m in moments)] == [35, 200]
    # Not evenly: of 200 gaps of a tenth of a second some are a tenth of that.
    gaps = [after - before for before, after in itertools.pairwise(moments[35:])]
    assert min(gaps) < 0.01 and max(gaps) > 0.3


def test_the_cache_drops_the_ends_of_what_was_not_used_for_longest() -> None:
    told: set[int] = set()

    def tell(stored: Sequence[int], removed: Sequence[int]) -> None:
        told.difference_update(removed)
        told.update(stored)

    cache = PrefixCache(5, tell)
    cache.use([1, 2, 3])
    cache.use([11, 12])
    cache.use([1])
    cache.use([21, 22])
    assert told == {1, 21, 22, 11, 12} or told == {1, 2, 11, 21, 22}
    for identities in ([1, 2, 3], [11, 12], [21, 22]):
        assert cache.num_cached(identities) == sum(identity in told for identity in identities)
