import logging

import pytest

from tandem.prefill_worker.config import PrefillConfig
from tests.fakes.workers import WorkerPair


def batch_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if " batch: " in record.getMessage()]


def test_batches_are_logged_at_level_debug(caplog: pytest.LogCaptureFixture) -> None:
    pair = WorkerPair(prefill={"config": PrefillConfig(chunk_size=8, min_shared_tokens=4)})
    pair.submit("a", list(range(9)), max_tokens=3)
    pair.run()
    with (
        caplog.at_level(logging.DEBUG, "tandem.prefill_worker"),
        caplog.at_level(logging.DEBUG, "tandem.decode_worker"),
    ):
        pair.submit("b", [*range(8), *range(100, 107)], max_tokens=3)
        pair.submit("c", list(range(200, 209)), max_tokens=1)
        pair.submit("d", list(range(300, 304)), max_tokens=1)
        pair.run()
    assert [line for line in batch_lines(caplog) if line.startswith("prefill")] == [
        "prefill batch: 2 new sequences, 8 new tokens, 8 cached tokens, 2 running, 1 queued",
        "prefill batch: 0 new sequences, 8 new tokens, 0 cached tokens, 2 running, 1 queued",
        "prefill batch: 1 new sequences, 4 new tokens, 0 cached tokens, 1 running, 0 queued",
    ]
    assert [line for line in batch_lines(caplog) if line.startswith("decode")] == [
        "decode batch: 1 new sequences, 1 new tokens, 8 cached tokens, 1 running, 0 queued",
        "decode batch: 0 new sequences, 1 new tokens, 0 cached tokens, 1 running, 0 queued",
    ]


def test_no_batch_is_logged_at_level_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pair = WorkerPair()
    pair.submit("a", list(range(9)))
    pair.run()
    assert not batch_lines(caplog)
