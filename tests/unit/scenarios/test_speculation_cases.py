"""Requests with which speculation often goes wrong elsewhere: every draft is right, and every output is unchanged."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from llguidance import LLMatcher

from tandem.decode_worker.config import DecodeConfig
from tandem.engine.engine import Engine
from tandem.messages import Drafted
from tandem.sampling_params import SamplingParams
from tests.fakes.scripted_drafter import scripted
from tests.unit.scenarios.test_speculation import (
    ENDS,
    GRAMMARS,
    NUM_PAGES,
    PAGE_SIZE,
    Request,
    Requests,
    draw_weights,
    engine,
)

__all__ = ["engine"]
PROMPT = [7, 3, 9, 7, 3, 9, 7]
MAX_DRAFTS = 4
NUM_FREE_PAGES = NUM_PAGES - 2 * PAGE_SIZE


def outputs_with_right_drafts(
    engine: Engine, samplings: Sequence[SamplingParams], given_up: Sequence[int] = (), beyond: Sequence[int] = ()
) -> tuple[list[Request], Drafted]:
    """Returns the requests, whose results are those without speculation, and their drafts.

    Args:
        given_up: lengths of the output at which another attempt begins.
        beyond: tokens that are drafted in place of a final stop token, and behind it.
    """
    draw_weights(engine, 5)
    plain, speculating = Requests(), Requests()
    for number, sampling in enumerate(samplings):
        plain[f"r{number}"] = Request(PROMPT, sampling)
        speculating[f"r{number}"] = Request(PROMPT, sampling, [*given_up])
    plain.run(engine, DecodeConfig(), NUM_FREE_PAGES)
    known = [request.prompt_ids + request.token_ids for request in plain.values()]

    def right(token_ids: Sequence[int], most: int) -> list[int]:
        ids = next(ids for ids in known if ids[: len(token_ids)] == token_ids)
        end = len(ids) - 1 if beyond and ids[-1] in ENDS else len(ids)
        return [*ids[len(token_ids) : end], *beyond][:most]

    with scripted(right, MAX_DRAFTS) as path:
        [drafted] = speculating.run(engine, DecodeConfig(speculation=path), NUM_FREE_PAGES)
    for name, request in speculating.items():
        alone = plain[name]
        assert (request.token_ids, request.finish_reason) == (alone.token_ids, alone.finish_reason)
        assert request.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    return [*speculating.values()], drafted


SAMPLED = SamplingParams(24, temperature=0.9, seed=11)


@pytest.mark.parametrize(
    "sampling",
    [
        replace(SAMPLED, repetition_penalty=1.4),
        replace(SAMPLED, frequency_penalty=0.9, presence_penalty=0.6),
        # Not on the first token of a step alone.
        replace(SAMPLED, logit_bias=((5, 6.0), (9, -100.0))),
        replace(SAMPLED, min_p=0.2),
        replace(SAMPLED, top_p=0.7, top_k=5),
        replace(SAMPLED, allowed_token_ids=(5, 6, 7, 8)),
        SamplingParams(24, repetition_penalty=1.4),
    ],
    ids=["repetition", "frequency", "bias", "min_p", "top_p", "allowed", "greedy"],
)
def test_parameters_hold_for_every_token_of_a_step(engine: Engine, sampling: SamplingParams) -> None:
    [request], drafted = outputs_with_right_drafts(engine, [sampling])
    assert drafted.num_accepted == drafted.num_tokens > len(request.token_ids) // 2


def test_different_samples_of_one_prompt_share_its_pages(engine: Engine) -> None:
    requests, drafted = outputs_with_right_drafts(engine, [replace(SAMPLED, seed=seed) for seed in range(5)])
    assert len({tuple(request.token_ids) for request in requests}) == 5
    assert drafted.num_accepted > sum(len(request.token_ids) for request in requests) // 2
    assert drafted.num_accepted == sum(request.num_accepted for request in requests)


def test_every_token_of_a_step_has_its_own_log_probabilities(engine: Engine) -> None:
    [request], _ = outputs_with_right_drafts(engine, [replace(SAMPLED, num_logprobs=3)])
    assert len(request.logprobs) == len(request.token_ids) == len(set(request.logprobs))


@pytest.mark.parametrize("given_up", [(), (1,), (3, 9)], ids=["whole", "after_the_first_token", "twice"])
def test_grammar_takes_each_token_once_also_after_a_restart(engine: Engine, given_up: Sequence[int]) -> None:
    """The drafts' matcher begins with tokens that other attempts and the prefill sampled."""
    sampling = replace(SAMPLED, grammar=GRAMMARS[2], stop_token_ids=ENDS)
    [request], drafted = outputs_with_right_drafts(engine, [sampling], given_up)
    assert request.finish_reason in ("stop", "length") and drafted.num_accepted == drafted.num_tokens


def test_grammar_that_ends_within_a_step_ends_the_output(engine: Engine) -> None:
    grammar = LLMatcher.grammar_from_regex("(ab){6}")
    [request], _ = outputs_with_right_drafts(engine, [SamplingParams(24, grammar=grammar, stop_token_ids=ENDS)])
    assert request.finish_reason == "stop" and request.token_ids[-1] in ENDS and len(request.token_ids) < 24


def test_drafts_beyond_the_end_of_a_grammar_do_not_count(engine: Engine) -> None:
    sampling = SamplingParams(24, grammar=LLMatcher.grammar_from_regex("(ab){6}"), stop_token_ids=ENDS)
    [request], drafted = outputs_with_right_drafts(engine, [sampling], beyond=PROMPT)
    assert request.finish_reason == "stop" and request.token_ids[-1] in ENDS
    # The first token and the last are no drafts.
    assert drafted.num_tokens == drafted.num_accepted <= len(request.token_ids) - 2


def test_stop_token_within_a_step_ends_the_output(engine: Engine) -> None:
    greedy = SamplingParams(24, repetition_penalty=1.4)
    [whole], _ = outputs_with_right_drafts(engine, [greedy])
    first = next(place for place in range(5, 24) if whole.token_ids.index(whole.token_ids[place]) == place)
    stop = replace(greedy, stop_token_ids=(whole.token_ids[first],))
    [request], _ = outputs_with_right_drafts(engine, [stop])
    assert (request.token_ids, request.finish_reason) == (whole.token_ids[: first + 1], "stop")
    # The minimum is passed within a step.
    for min_tokens in range(first - 2, first + 1):
        [same], _ = outputs_with_right_drafts(engine, [replace(stop, min_tokens=min_tokens)])
        assert same.token_ids == request.token_ids
    [longer], _ = outputs_with_right_drafts(engine, [replace(stop, min_tokens=first + 3)])
    assert len(longer.token_ids) >= first + 3 and longer.token_ids[:first] == whole.token_ids[:first]


def test_drafts_pass_no_limit(engine: Engine) -> None:
    for max_tokens in range(1, 8):
        [request], _ = outputs_with_right_drafts(engine, [replace(SAMPLED, max_tokens=max_tokens)])
        assert (len(request.token_ids), request.finish_reason) == (max_tokens, "length")
