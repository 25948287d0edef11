"""What the soak's model confirms: outputs that rounding explains, and no others."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.cpu import MODEL
from benchmarks.soak.case import Case
from benchmarks.soak.confirm import Judge
from benchmarks.soak.differences import confirm_firsts, settle
from benchmarks.soak.kinds.table import KINDS
from benchmarks.soak.possible_tokens import NOISE, possible_tokens
from benchmarks.soak.traffic import Difference, Tally
from tandem.engine.randomness import uniform
from tandem.engine.sampler import sample
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.weights.resolve import resolve_model
from tandem.sampling_params import SamplingParams

VOCAB_SIZE = 2000
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 40, "min_p": 0.02},
    {"temperature": 1.0, "top_k": 500, "top_p": 0.6},
]


def drawn(logits: torch.Tensor, sampling: SamplingParams) -> int:
    return int(sample(logits[None], [TokenSequence([1], 1, [], sampling=sampling)]).token_ids)


def flat(generator: torch.Generator) -> torch.Tensor:
    """Logits with many tokens about equally likely."""
    return torch.randn(VOCAB_SIZE, generator=generator) * 0.5


@pytest.mark.parametrize("fields", SAMPLINGS)
def test_a_token_chosen_from_rounded_logits_is_possible(fields: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    num_changed = 0
    for seed in range(60):
        sampling = SamplingParams(max_tokens=9, seed=seed, **fields)
        logits = flat(generator)
        possible = possible_tokens(logits, sampling, uniform(seed, 1))
        chosen = drawn(logits, sampling)
        assert possible[chosen]
        # The worst that rounding can do moves all boundaries one way.
        for noise in (
            (torch.arange(VOCAB_SIZE) < chosen) * 2.0 - 1,
            torch.randn(VOCAB_SIZE, generator=generator).sign(),
        ):
            for sign in (1, -1):
                other = drawn(logits + sign * NOISE * noise, sampling)
                assert possible[other]
                num_changed += other != chosen
    assert num_changed or sampling.is_greedy


@pytest.mark.parametrize("fields", SAMPLINGS)
def test_few_tokens_are_possible(fields: dict[str, Any]) -> None:
    """At a wrong place in the draw nothing is confirmed: the possible tokens have little probability."""
    generator = torch.Generator().manual_seed(2)
    sampling = SamplingParams(max_tokens=9, **fields)
    for seed in range(60):
        logits = flat(generator)
        u = uniform(seed, 1)
        possible = possible_tokens(logits, sampling, u)
        inner = possible.clone()
        # Without the two at the edges, of which a part is possible.
        ids = possible.nonzero()[:, 0]
        inner[ids[0]] = inner[ids[-1]] = False
        share = float((logits / (sampling.temperature or 1.0)).softmax(0)[inner].sum())
        assert share < 0.01 and len(ids) < 30


def test_a_margin_above_the_noise_leaves_one_token() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 2.0 - 2.1 * NOISE])
    assert possible_tokens(logits, SamplingParams(max_tokens=1), 0.5).tolist() == [False, False, True, False]
    near = torch.tensor([0.0, 1.0, 2.0, 2.0 - 1.9 * NOISE])
    assert possible_tokens(near, SamplingParams(max_tokens=1), 0.5).tolist() == [False, False, True, True]
    halves = torch.zeros(2)
    sampling = SamplingParams(max_tokens=1, temperature=1.0)
    assert possible_tokens(halves, sampling, 0.5 - NOISE).tolist() == [True, False]
    assert possible_tokens(halves, sampling, 0.5 - NOISE / 4).tolist() == [True, True]
    assert possible_tokens(halves, sampling, 0.5 + NOISE).tolist() == [False, True]


def test_forbidden_tokens_are_never_possible() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0])
    for u in (0.0, 0.3, 0.5, 0.999):
        possible = possible_tokens(logits, SamplingParams(max_tokens=1, temperature=1.0, top_p=0.99), u)
        assert possible.any() and not possible[0] and not possible[2]


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(resolve_model(MODEL))


def test_both_tokens_of_a_tie_are_confirmed_and_no_other(judge: Judge) -> None:
    """Behind a tie, too, each token must be the one that the model draws."""
    prompt = judge.encode("The ship that came to the town was")
    with torch.inference_mode():
        row = judge.logits(prompt)[-1]
        fields: dict[str, Any] = {"max_tokens": 2, "temperature": 1.5, "ignore_eos": True}
        ties = ((seed, possible_at(row, 1.5, seed, len(prompt))) for seed in range(1000))
        seed, tied = next((seed, ids) for seed, ids in ties if len(ids) >= 2)
        case = Case(prompt, {**fields, "seed": seed}, [])
        for token_id in tied[:2]:
            seconds = possible_at(judge.logits([*prompt, token_id])[-1], 1.5, seed, len(prompt) + 1)
            second = seconds[0]
            assert judge.objection(replace(case, output=[token_id, second])) == ""
            assert judge.objection(replace(case, output=judge.decode([token_id, second]))) == ""
            assert "token 1" in judge.objection(
                replace(case, output=[token_id, next(i for i in range(100, 200) if i not in seconds)])
            )
        wrong = next(i for i in range(100, 200) if i not in tied)
        assert "token 0" in judge.objection(replace(case, output=[wrong, 100]))
        assert "behind ''" in judge.objection(replace(case, output=judge.decode([wrong, 100])))


def possible_at(row: torch.Tensor, temperature: float, seed: int, position: int) -> list[int]:
    sampling = SamplingParams(max_tokens=1, temperature=temperature)
    return [int(i) for i in possible_tokens(row, sampling, uniform(seed, position)).nonzero()[:, 0]]


def test_ends_are_judged(judge: Judge) -> None:
    """A part is right only where the client left; a whole output ends at its limit or its end token."""
    prompt = judge.encode("One, two, three, four,")
    output = judge.encode(" five, six")
    case = Case(prompt, {"max_tokens": len(output)}, output)
    assert judge.objection(case) == ""
    assert judge.objection(replace(case, finish_reason="length")) == ""
    assert judge.objection(replace(case, finish_reason="stop")) == "the finish reason cannot be 'stop'"
    part = replace(case, output=output[:2])
    assert "ends at token 2" in judge.objection(part)
    assert judge.objection(replace(part, is_whole=False)) == ""
    assert judge.objection(replace(case, output=" five, s", is_whole=False)) == ""
    assert judge.objection(replace(case, output=" five, s")) != ""


def test_structure_is_part_of_the_reference(judge: Judge) -> None:
    case = Case("The colour is", {"max_tokens": 8}, "red.", structure=("regex", r"(red|xyz)\."))
    assert judge.objection(case) == ""
    assert judge.objection(replace(case, output="xyz.")) != ""
    assert judge.objection(replace(case, structure=None)) != ""


def test_a_difference_is_a_tie_or_wrong(judge: Judge) -> None:
    """Also if only one of several outputs is wrong, or the judge fails."""
    output = judge.encode(" five, six")
    case = Case("One, two, three, four,", {"max_tokens": len(output)}, " five, six")
    wrong = replace(case, output=" nine, six")
    tally = Tally()
    differences = [
        Difference("greedy, gRPC", number, cases, f"request {number}")
        for number, cases in enumerate(([case], [case, wrong], [case, case]))
    ]
    remarks = settle(differences, tally, judge.objection)
    counts = tally.kinds["greedy, gRPC"]
    assert (counts.num_ties, counts.num_wrong, len(remarks)) == (2, 1, 2) and not tally.is_clean
    assert "request 1 (behind '' transformers has ' five'" in tally.notes[0]

    def failing(_: Case) -> str:
        raise TimeoutError

    failed = Tally()
    assert settle(differences[:1], failed, failing) == [] and not failed.is_clean
    assert confirm_firsts([("one", case), ("two", case)], judge.objection) == []
    assert len(confirm_firsts([("one", wrong), ("two", wrong)], judge.objection)) == 1


def test_every_kind_with_an_output_can_be_confirmed() -> None:
    """So that a sampled kind with a tie is not called wrong."""
    answers: dict[str, Any] = {"log probabilities, gRPC": ([1], [-0.5]), "streamed chat, openai": ("a", "stop")}
    answers["chat with tools, openai"] = ("{}", [1], [2])
    without = set()
    for kind in (made([[1]], ["text"]) for made in KINDS):
        answer = answers.get(kind.name, "a" if "gRPC" not in kind.name else [1])
        cases = kind.cases(1, answer, is_first=True)
        if not cases:
            without.add(kind.name)
        if "cancelled" in kind.name:
            assert [case.is_whole for case in cases] == [True]
            assert [case.is_whole for case in kind.cases(1, answer, is_first=False)] == [False]
    assert without == {"embeddings, gRPC", "embeddings, openai", "bad request, HTTP", "new prompt twice, gRPC"}
