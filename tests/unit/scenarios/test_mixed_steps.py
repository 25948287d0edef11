"""Mixed steps of a real CPU engine short of pages, against transformers.

Requests arrive, share prefixes, are aborted and given back at random.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.output import ForwardOutput
from tests.cluster.conftest import EOS_TOKEN_IDS, VOCAB_SIZE, save_tiny_model
from tests.fakes.asynchronous import make_asynchronous
from tests.fakes.scenario import Scenario
from tests.fakes.stand_in import stands_in_for

NUM_STEPS = 400
NUM_COMPARED = 30
# Rounding may swap the two most likely tokens if their logits are this close.
TIE = 1e-3


@pytest.mark.parametrize("overlaps", [False, True])
def test_greedy_tokens_match_transformers(overlaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(tmp_path / "tiny")
    config = EngineConfig(str(tmp_path / "tiny"), num_pages=48, num_threads=1, mixed_steps=True)
    engine = build_engine(config, "scenario", lambda doing: None)
    if overlaps:
        make_asynchronous(monkeypatch)
    seen: Counter[tuple[str, bool]] = Counter()
    forward = Engine.forward

    @stands_in_for(Engine.forward)
    def counted(engine: Engine, batch: Batch, meanwhile: Callable[[], None] | None = None) -> ForwardOutput:
        seen[batch.mode, batch.feed is not None] += 1
        return forward(engine, batch, meanwhile)

    monkeypatch.setattr(Engine, "forward", counted)
    samplings = [
        lambda seed: {"stop_token_ids": tuple(EOS_TOKEN_IDS)},
        lambda seed: {"temperature": 0.9, "seed": seed, "repetition_penalty": 1.1},
    ]
    scenario = Scenario(engine, VOCAB_SIZE, samplings, seed=2)
    for number in range(NUM_STEPS):
        scenario.step()
        if number % 20 == 0:
            scenario.check()
    scenario.drain()
    assert scenario.num_given_back and scenario.num_aborted
    assert seen["mixed", overlaps] > 20
    greedy = [request for request in scenario.finished if request.sampling.is_greedy][-NUM_COMPARED:]
    assert len(greedy) == NUM_COMPARED
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny").float().eval()
    for request in greedy:
        whole = torch.tensor([request.prompt_ids + request.output_ids])
        with torch.inference_mode():
            logits = reference(whole).logits[0, len(request.prompt_ids) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(request.output_ids)[:, None])[:, 0]
        assert (logits.max(dim=1).values - chosen).max() <= TIE
    engine.pool.close()
