"""min_tokens over real schedulers and a real engine."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.router.text.grammar_check import translate
from tandem.sampling_params import SamplingParams
from tests.cluster.conftest import EOS_TOKEN_IDS, save_tiny_model
from tests.fakes.whole_output import whole_output

TIMEOUT_S = 30.0
END = EOS_TOKEN_IDS[0]
# Makes an output end as soon as it may.
EAGER_TO_END = ((END, 100.0),)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path: Path = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_model(path)
    engine = build_engine(EngineConfig(str(path), num_pages=64, num_threads=1), "min-tokens", lambda doing: None)
    yield engine
    engine.pool.close()


def generate(engine: Engine, output_ids: tuple[int, ...] = (), **sampling: Any) -> list[int]:
    """Return the whole output. Args: output_ids: output of earlier attempts."""
    params = SamplingParams(**{"max_tokens": 12, "logit_bias": EAGER_TO_END, "stop_token_ids": (END,), **sampling})
    return whole_output(engine, [1, 2, 3], params, output_ids, TIMEOUT_S)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}])
def test_output_ends_at_min_tokens_on_every_attempt(engine: Engine, sampling: Any) -> None:
    assert generate(engine, **sampling) == [END]
    for min_tokens in (1, 2, 7, 12):
        output = generate(engine, min_tokens=min_tokens, **sampling)
        assert END not in output[:min_tokens]
        assert len(output) == min(min_tokens + 1, 12) and (output[-1] == END) == (min_tokens < 12)
        for num_known in range(1, len(output)):
            again = generate(engine, tuple(output[:num_known]), min_tokens=min_tokens, **sampling)
            assert again == output, num_known


def test_a_grammar_that_is_at_its_end_wins(engine: Engine) -> None:
    text = "ab"
    grammar = translate("regex", text)
    deadline = time.monotonic() + TIMEOUT_S
    while not (constraint := engine.constraint(grammar)).is_ready:  # type: ignore[union-attr]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert constraint is not None and not constraint.error
    output = generate(engine, min_tokens=10, grammar=grammar)
    assert len(output) == 3 and output[-1] == END


def test_a_grammar_that_may_go_on_does(engine: Engine) -> None:
    output = generate(engine, min_tokens=10, grammar=translate("regex", "a*"))
    assert END not in output[:10] and len(set(output[:10])) == 1 and output[10:] == [END]
