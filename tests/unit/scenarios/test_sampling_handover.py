"""Sampling across handovers and restarts: positions, seeds, and logprobs beside their tokens."""

import pytest

from tandem.messages import FirstToken, TokenEvent, Tokens
from tandem.sampling_params import TokenLogprobs
from tests.fakes.engine import expected_tokens
from tests.fakes.workers import WorkerPair

PROMPT = list(range(10))


def draws(pair: WorkerPair) -> list[tuple[int, int]]:
    """Return (seed, position) of each sampled token on both workers, by position."""
    return sorted([*pair.p.engine.draws, *pair.d.engine.draws], key=lambda draw: draw[1])


@pytest.mark.parametrize("num_passed_on", range(6))
def test_a_restart_draws_with_the_same_seeds_and_positions(num_passed_on: int) -> None:
    undisturbed = WorkerPair()
    undisturbed.submit("r", PROMPT, max_tokens=6, seed=7)
    undisturbed.run()
    assert draws(undisturbed) == [(7, len(PROMPT) + i) for i in range(6)]
    restarted = WorkerPair()
    passed_on = tuple(expected_tokens(PROMPT, num_passed_on))
    restarted.submit("r", PROMPT, max_tokens=6, seed=7, output_ids=passed_on, attempt=1)
    restarted.run()
    assert draws(restarted) == draws(undisturbed)[num_passed_on:]


def test_requests_of_one_batch_keep_their_seeds() -> None:
    pair = WorkerPair()
    for seed in range(4):
        pair.submit(f"r{seed}", [100 + seed, *PROMPT[: 5 + seed]], max_tokens=3, seed=seed)
    pair.run()
    expected = [(seed, 6 + seed + i) for seed in range(4) for i in range(3)]
    assert sorted(draws(pair)) == sorted(expected)


def test_reported_tokens_carry_their_logprobs() -> None:
    pair = WorkerPair()
    pair.submit("asks", PROMPT, max_tokens=4, num_logprobs=0)
    pair.submit("does not", PROMPT[:5], max_tokens=4)
    pair.run()
    first = {m.request_id: m for m in pair.p.outbox.of(FirstToken)}
    assert first["asks"].logprobs == (TokenLogprobs(-10.0),)
    assert first["does not"].logprobs == ()
    events: list[TokenEvent] = [e for m in pair.d.outbox.of(Tokens) for e in m.events]
    # The decode worker repeats the first token from Committed.
    asked = [(e.index + i, p) for e in events if e.request_id == "asks" for i, p in enumerate(e.logprobs)]
    assert asked == [(i, TokenLogprobs(-10.0 - i)) for i in range(4)]
    assert all(e.logprobs == () for e in events if e.request_id == "does not")
