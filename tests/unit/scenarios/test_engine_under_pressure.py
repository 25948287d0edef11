"""A real CPU engine short of pages, with random arrivals, aborts and given-back requests."""

from pathlib import Path

from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tests.cluster.conftest import EOS_TOKEN_IDS, VOCAB_SIZE, save_tiny_model
from tests.fakes.scenario import Scenario, matches_solo_run

NUM_STEPS = 600
NUM_COMPARED = 25


def test_greedy_tokens_match_solo_runs(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "tiny")
    config = EngineConfig(str(tmp_path / "tiny"), num_pages=64, num_threads=1)
    engine = build_engine(config, "scenario", lambda doing: None)
    samplings = [
        lambda seed: {"stop_token_ids": tuple(EOS_TOKEN_IDS)},
        lambda seed: {"temperature": 0.9, "seed": seed},
    ]
    scenario = Scenario(engine, VOCAB_SIZE, samplings, seed=1)
    for number in range(NUM_STEPS):
        scenario.step()
        if number % 100 == 0:
            scenario.check()
    scenario.drain()
    assert scenario.num_given_back and scenario.num_aborted
    greedy = [request for request in scenario.finished if request.sampling.is_greedy][-NUM_COMPARED:]
    assert len(greedy) == NUM_COMPARED
    assert all(matches_solo_run(request, engine, tie=1e-3) for request in greedy)
    engine.pool.close()
