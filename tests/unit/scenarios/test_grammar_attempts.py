"""Outputs under a grammar over several attempts, with real schedulers and a real engine."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.grammars import Constraint
from tandem.router.text.grammar_check import translate
from tandem.sampling_params import SamplingParams
from tests.cluster.conftest import EOS_TOKEN_IDS, save_tiny_model
from tests.fakes.whole_output import whole_output

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
    grammar = translate("regex", "([a-f]{2}|[0-9] ){20}")
    params = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=1.0, seed=7, stop_token_ids=tuple(EOS_TOKEN_IDS), grammar=grammar
    )
    return whole_output(engine, [1, 2, 3], params, output_ids, TIMEOUT_S)


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
