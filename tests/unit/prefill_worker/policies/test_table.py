from collections.abc import Sequence

import pytest

from tandem.engine.kvcache.cache_manager import CacheManager
from tandem.messages import FirstToken
from tandem.prefill_worker.config import PrefillConfig
from tandem.prefill_worker.policies.base import PrefillPolicy
from tandem.prefill_worker.policies.table import PREFILL_POLICIES
from tandem.prefill_worker.queued_request import QueuedRequest
from tests.fakes.engine import expected_tokens
from tests.fakes.workers import WorkerPair


def make_pair(schedule: str, chunk_size: int) -> WorkerPair:
    config = PrefillConfig(chunk_size, schedule=schedule, min_shared_tokens=4)
    return WorkerPair(prefill={"config": config, "num_pages": 256}, num_pages=256)


class YoungestFirst(PrefillPolicy):
    def order(self, queue: Sequence[QueuedRequest], cache: CacheManager) -> list[QueuedRequest]:
        return list(reversed(queue))


OWN = f"{__name__}:YoungestFirst"


@pytest.mark.parametrize("name", PREFILL_POLICIES.names)
def test_every_name_is_a_policy(name: str) -> None:
    assert issubclass(PREFILL_POLICIES.load(name), PrefillPolicy)


@pytest.mark.parametrize("name", [*PREFILL_POLICIES.names, OWN])
def test_every_policy_serves_all_requests(name: str) -> None:
    pair = make_pair(name, chunk_size=16)
    prompts = {f"r{i}": [*range(i % 3, 12 + i % 3), i] for i in range(20)}
    for request_id, prompt in prompts.items():
        pair.submit(request_id, prompt)
    pair.run()
    for request_id, prompt in prompts.items():
        assert pair.output(request_id) == expected_tokens(prompt, 5)
    pair.check_idle()


def test_custom_policy_is_loaded_by_import_path() -> None:
    pair = make_pair(OWN, chunk_size=4)
    for i in range(4):
        pair.submit(f"r{i}", [i * 10, 1, 2, 3])
    pair.run()
    assert [m.request_id for m in pair.p.outbox.of(FirstToken)] == ["r3", "r2", "r1", "r0"]
