"""Outputs under a grammar over several attempts, with real schedulers and a real engine."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.both_worker.local_worker import LocalWorker
from tandem.decode_worker.config import DecodeConfig
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.grammars import Constraint
from tandem.messages import Finished, FirstToken, Tokens
from tandem.prefill_worker.config import PrefillConfig
from tandem.router.text.grammar_check import translate
from tandem.sampling_params import SamplingParams
from tests.cluster.conftest import EOS_TOKEN_IDS, save_tiny_model

TIMEOUT_S = 60.0
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path: Path = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_model(path)
    engine = build_engine(EngineConfig(str(path), num_pages=64, num_threads=1), "attempts", lambda doing: None)
    yield engine
    engine.pool.close()


def generate(engine: Engine, output_ids: Sequence[int] = ()) -> list[int]:
    """Return the whole output. Args: output_ids: output of earlier attempts."""
    messages: list[Any] = []
    worker = LocalWorker(engine, PrefillConfig(), DecodeConfig(), messages.append)
    grammar = translate("regex", "([a-f]{2}|[0-9] ){20}")
    params = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=1.0, seed=7, stop_token_ids=tuple(EOS_TOKEN_IDS), grammar=grammar
    )
    worker.submit("r", [1, 2, 3], params, output_ids=output_ids)

    def has_ended() -> bool:
        return any(isinstance(m, Finished) or (isinstance(m, FirstToken) and m.finish_reason) for m in messages)

    worker.run_until(has_ended, TIMEOUT_S)
    found = {m.index: m.token_id for m in messages if isinstance(m, FirstToken)}
    for message in messages:
        if isinstance(message, Tokens):
            for event in message.events:
                found.update(enumerate(event.token_ids, event.index))
    return [*output_ids, *(found[index] for index in sorted(found))]


def test_every_attempt_goes_on_exactly_and_follows_one_token_a_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = generate(engine)
    assert len(whole) > 8
    own_thread, lengths = threading.get_ident(), []
    take_new = Constraint.take_new

    def noted(constraint: Constraint, token_ids: Sequence[int], prompt_len: int) -> Sequence[int]:
        new = take_new(constraint, token_ids, prompt_len)
        assert threading.get_ident() == own_thread
        lengths.append(len(new))
        return new

    monkeypatch.setattr(Constraint, "take_new", noted)
    for length in (1, 2, 5, len(whole) - 1):
        assert generate(engine, whole[:length]) == whole
    assert lengths and max(lengths) == 1
