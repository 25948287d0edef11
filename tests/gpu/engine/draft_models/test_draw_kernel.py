"""The kernels that draw drafts, against the sampler."""

import random

import pytest
import torch

from tandem.engine.draft_models.pass_draws import MAX_PASSES, PassDraws
from tandem.engine.drafted_row import DraftedRow
from tandem.engine.sampler import sample
from tandem.engine.token_sequence import TokenSequence
from tandem.sampling_params import SamplingParams

NUM_PADDING = 5


def random_sampling(rng: random.Random, vocab_size: int, has_filters: bool) -> SamplingParams:
    return SamplingParams(
        20,
        rng.choice((0.0, 0.3, 0.7, 1.0, 2.0)),
        top_k=rng.choice((0, 0, 1, 20, vocab_size - 1, vocab_size, vocab_size + 5) if has_filters else (0,)),
        top_p=rng.choice((1.0, 1.0, 0.95, 0.5, 0.01) if has_filters else (1.0,)),
        min_p=rng.choice((0.0, 0.0, 0.05)),
        seed=rng.randrange(2**64),
    )


@pytest.mark.parametrize(("vocab_size", "num_rows"), [(300, 96), (32_000, 96), (128_256, 4), (151_936, 128)])
@pytest.mark.parametrize("has_filters", [False, True], ids=["plain", "filtered"])
def test_drafts_are_the_samplers_tokens(vocab_size: int, num_rows: int, has_filters: bool) -> None:
    """In as many passes as there may be, with few and many equal logits, and parts of all sizes."""
    rng, device = random.Random(vocab_size), torch.device("cuda", 0)
    generator = torch.Generator(device).manual_seed(vocab_size)
    prompts = [[number, 1, 2] for number in range(num_rows)]
    rows = [
        DraftedRow(TokenSequence(prompt, 3, (), sampling=random_sampling(rng, vocab_size, has_filters)), 0)
        for prompt in prompts
    ]
    draws = PassDraws(num_rows + NUM_PADDING, device)
    draws.begin([row.token_ids[-1] for row in rows], rows)
    assert draws.token_ids.tolist() == [2] * num_rows + [0] * NUM_PADDING and draws.has_filters == has_filters
    for number in range(MAX_PASSES):
        logits = torch.randn(num_rows, vocab_size, generator=generator, device=device)
        logits = logits.mul_((1.0, 5.0)[number % 2]).bfloat16()
        expected = sample(logits.float(), rows).token_ids
        draws.draw(logits, draws.has_filters)
        assert torch.equal(draws.token_ids, draws.drawn[number])
        different = (draws.token_ids[:num_rows] != expected).nonzero().flatten().tolist()
        assert not different, [(rows[place].sampling, int(draws.token_ids[place])) for place in different[:3]]
        for row in rows:
            row.num_drafts += 1


@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_first_of_equal_tokens_is_the_most_likely(num_rows: int) -> None:
    device = torch.device("cuda", 0)
    draws = PassDraws(4, device)
    draws.begin([7] * num_rows, ())
    logits = torch.zeros(num_rows, 50_000, dtype=torch.bfloat16, device=device)
    logits[:, 20_000::7000] = 3.0
    draws.draw(logits, draws.has_filters)
    assert draws.token_ids.tolist() == [20_000] * num_rows + [0] * (4 - num_rows)
    assert draws.drawn[0].tolist() == draws.token_ids.tolist() and not draws.drawn[1:].any()


def test_no_row_leaves_the_vocabulary() -> None:
    """Also with numbers that are not finite, and at the border of 1."""
    device = torch.device("cuda", 0)
    logits = torch.full((4, 5000), float("-inf"), dtype=torch.bfloat16, device=device)
    logits[0] = float("nan")
    logits[2, 4999] = 1.0
    logits[3] = 0.0
    rows = [DraftedRow(TokenSequence([1], 1, (), sampling=SamplingParams(9, 1.0, seed=seed)), 0) for seed in range(4)]
    draws = PassDraws(4, device)
    draws.begin([1] * 4, rows)
    draws._floats[6:] = 1.0 - 2.0**-53
    draws.draw(logits, draws.has_filters)
    found = draws.token_ids.tolist()
    assert all(0 <= token_id < 5000 for token_id in found) and found[2] == 4999
