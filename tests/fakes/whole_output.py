"""One request through real schedulers, in a single thread."""

from collections.abc import Sequence
from typing import Any

from tandem.both_worker.local_worker import LocalWorker
from tandem.decode_worker.config import DecodeConfig
from tandem.engine.engine import Engine
from tandem.messages import Finished, FirstToken, Tokens
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams


def whole_output(
    engine: Engine, prompt_ids: Sequence[int], params: SamplingParams, output_ids: Sequence[int], timeout_s: float
) -> list[int]:
    """Return the whole output. Args: output_ids: output of earlier attempts."""
    messages: list[Any] = []
    worker = LocalWorker(engine, PrefillConfig(), DecodeConfig(), messages.append)
    worker.submit("r", prompt_ids, params, output_ids=output_ids)

    def has_ended() -> bool:
        return any(isinstance(m, Finished) or (isinstance(m, FirstToken) and m.finish_reason) for m in messages)

    worker.run_until(has_ended, timeout_s)
    found = {m.index: m.token_id for m in messages if isinstance(m, FirstToken)}
    for message in messages:
        if isinstance(message, Tokens):
            for event in message.events:
                found.update(enumerate(event.token_ids, event.index))
    return [*output_ids, *(found[index] for index in sorted(found))]
