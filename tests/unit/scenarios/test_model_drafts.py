"""Drafts by a model change no token, and a model that drafts for itself is right wherever the pages come from."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.decode_worker.config import DecodeConfig
from tandem.decode_worker.draft_depth import DraftDepth
from tandem.decode_worker.drafting import MAX_DRAFTS
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.draft_models.drafted_model import DraftedModel
from tandem.engine.engine import Engine
from tandem.messages import Drafted
from tandem.sampling_params import SamplingParams
from tests.cluster.conftest import VOCAB_SIZE, save_tiny_model
from tests.cluster.tiny_experts import save_tiny_experts
from tests.fakes.recorded_drafts import Made, drafts_of_one_prefill, record_drafts
from tests.fakes.tiny_drafters import add_mtp_layer, save_eagle_head
from tests.unit.scenarios.test_speculation import (
    ENDS,
    GRAMMARS,
    NUM_PAGES,
    PAGE_SIZE,
    Request,
    Requests,
    draw_weights,
    random_sampling,
)

SAMPLED = SamplingParams(24, temperature=0.9, seed=11)


@pytest.fixture(autouse=True)
def whole_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step has as many drafts as it may, whatever they cost."""
    monkeypatch.setattr(DraftDepth, "choose", lambda self, requests, num_requests, num_context: MAX_DRAFTS)


def build(path: Path, drafter: str) -> Engine:
    config = EngineConfig(
        str(path), num_pages=NUM_PAGES, page_size=PAGE_SIZE, num_threads=1, mixed_steps=True, drafter=drafter
    )
    return build_engine(config, f"model-drafts-{path.name}", lambda doing: None)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Engine whose draft model has the target's shape."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_model(path)
    engine = build(path, f"draft:{path}")
    yield engine
    engine.close()


@pytest.fixture(
    scope="module", params=["draft", "eagle", "deepseek_v3", pytest.param("deepseek_v32", marks=pytest.mark.slow)]
)
def any_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Engine with a drafter of each kind: another model, a head, or a layer for further tokens."""
    path = tmp_path_factory.mktemp("model") / request.param
    drafter = "mtp"
    if request.param.startswith("deepseek"):
        save_tiny_experts(path, request.param)
        add_mtp_layer(path)
    else:
        other = path.with_name("drafter")
        drafter = f"{request.param}:{other}"
        save_tiny_model(path)
        if request.param == "eagle":
            save_eagle_head(other, path)
        else:
            save_tiny_model(other, num_key_value_heads=4, head_dim=24)
    engine = build(path, drafter)
    yield engine
    engine.close()


def draw_both(engine: Engine, seed: int, difference: float) -> None:
    """Makes another random target, and a drafter that differs from it by noise of this size."""
    draw_weights(engine, seed)
    model = engine.model
    assert isinstance(model, DraftedModel)
    generator = torch.Generator().manual_seed(seed)
    of_target = dict(model.target.named_parameters())
    with torch.inference_mode():
        for name, parameter in model.drafter.named_parameters():
            noise = torch.empty(parameter.shape).normal_(0.0, difference, generator=generator)
            parameter.copy_(of_target[name] + noise)
    model.drafter.loaded()


def run_both(engine: Engine, requests: dict[str, Request], num_pages: int, max_batch_size: int = 8) -> Drafted:
    """Runs requests without and with drafts; the latter have their results. Returns the counts."""
    plain, speculating = Requests(), Requests()
    for name, request in requests.items():
        plain[name] = Request(request.prompt_ids, request.sampling)
        speculating[name] = request
    plain.run(engine, DecodeConfig(), NUM_PAGES - 10)
    [drafted] = speculating.run(engine, DecodeConfig(max_batch_size, speculation="draft:model"), num_pages)
    for name, request in speculating.items():
        alone = plain[name]
        assert (request.token_ids, request.finish_reason) == (alone.token_ids, alone.finish_reason), name
        assert request.logprobs == pytest.approx(alone.logprobs, abs=1e-4), name
    return drafted


def random_requests(rng: random.Random) -> dict[str, Request]:
    requests = {}
    for number in range(rng.randint(1, 6)):
        prompt_ids = [rng.randrange(VOCAB_SIZE - len(ENDS)) for _ in range(rng.randint(1, 40))]
        given_up = sorted(rng.sample(range(1, 31), rng.choice((0, 0, 1, 2))))
        requests[f"r{number}"] = Request(prompt_ids, random_sampling(rng), given_up)
    return requests


def test_tokens_are_those_without_drafts(engine: Engine) -> None:
    num_accepted = num_drafted = 0
    for seed in range(12):
        rng = random.Random(seed)
        draw_both(engine, seed, rng.choice((0.0, 0.01, 0.1, 1.0)))
        requests = random_requests(rng)
        largest = max(-(-(len(r.prompt_ids) + r.sampling.max_tokens) // PAGE_SIZE) for r in requests.values())
        num_pages = rng.choice((190, largest + 2, 2 * largest))
        drafted = run_both(engine, requests, num_pages, rng.choice((2, 8)))
        num_accepted, num_drafted = num_accepted + drafted.num_accepted, num_drafted + drafted.num_tokens
    assert 0 < num_accepted < num_drafted


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(24, repetition_penalty=1.4),
        SAMPLED,
        replace(SAMPLED, temperature=2.0, top_p=0.9, frequency_penalty=0.5, num_logprobs=3),
        replace(SAMPLED, min_p=0.1, logit_bias=((5, 6.0),)),
        replace(SAMPLED, allowed_token_ids=(5, 6, 7, 8)),
    ],
    ids=["greedy", "sampled", "penalties", "bias", "allowed"],
)
def test_model_drafts_its_own_tokens_at_any_temperature(engine: Engine, sampling: SamplingParams) -> None:
    draw_both(engine, 3, 0.0)
    requests = {f"r{i}": Request([7, 3, 9, 8, 2 + i], replace(sampling, seed=i), [9]) for i in range(3)}
    drafted = run_both(engine, requests, 190)
    assert drafted.num_accepted == drafted.num_tokens > 3 * 14 * 0.6


def test_drafts_go_on_as_far_as_the_grammar_allows(engine: Engine) -> None:
    draw_both(engine, 3, 0.0)
    sampling = replace(SAMPLED, grammar=GRAMMARS[0], stop_token_ids=ENDS)
    run_both(engine, {f"r{i}": Request([7, 3, 9], replace(sampling, seed=i), [3]) for i in range(3)}, 190)


def test_drafts_follow_from_the_tokens_alone(any_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever computed the pages: chunks, cached prefixes, steps with right or wrong drafts, mixed steps, restarts."""
    made: list[Made] = []
    for seed in range(2):
        rng = random.Random(seed)
        requests = random_requests(rng)
        stem = [rng.randrange(VOCAB_SIZE - len(ENDS)) for _ in range(rng.choice((PAGE_SIZE, 19)))]
        for request in requests.values():
            # A common beginning, so that later attempts and requests find cached pages.
            request.prompt_ids = stem + request.prompt_ids[: rng.randint(0, 20)]
        with monkeypatch.context() as patch:
            record_drafts(any_engine, patch, made)
            run_both(any_engine, requests, 190)
    assert len(made) > 20
    for sequence, drafts in made:
        assert drafts_of_one_prefill(any_engine, sequence, len(drafts)) == drafts
