"""The sampler on a GPU gives the CPU's tokens without waiting."""

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tandem.engine.sampler import SamplerOutput, sample
from tandem.engine.token_sequence import TokenSequence
from tandem.sampling_params import SamplingParams


def any_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    biased = sorted(rng.sample(range(vocab_size), rng.choice([0, 0, 3])))
    num_logprobs = rng.choice([None, None, 0, 5, 20])
    num_named = 0 if num_logprobs is None else rng.choice([0, 0, 3, 40])
    return SamplingParams(
        max_tokens=60,
        min_tokens=rng.choice([0, 0, 30]),
        stop_token_ids=tuple(rng.sample(range(vocab_size), 2)),
        temperature=rng.choice([0.0, 0.3, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 20, 1024, 1500]),
        top_p=rng.choice([1.0, 0.95, 0.5]),
        min_p=rng.choice([0.0, 0.0, 0.02]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        presence_penalty=rng.choice([0.0, 0.0, 1.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.5]),
        logit_bias=tuple((token_id, rng.uniform(-5, 5)) for token_id in biased),
        seed=rng.getrandbits(64),
        num_logprobs=num_logprobs,
        allowed_token_ids=tuple(rng.sample(range(vocab_size), rng.choice([0, 0, 0, 1, 50, 3000]))),
        logprob_token_ids=tuple(rng.sample(range(vocab_size), num_named)),
    )


def any_sequence(rng: random.Random, sampling: SamplingParams, vocab_size: int) -> TokenSequence:
    prompt_len = rng.randint(1, 200)
    token_ids = rng.choices(range(vocab_size), k=prompt_len + rng.randint(0, 50))
    return TokenSequence(token_ids, prompt_len, [], sampling=sampling, num_pending=rng.randint(0, 1))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make every wait for the device raise RuntimeError."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_like_the_cpu(
    logits: torch.Tensor, sequences: list[TokenSequence], input_ids: torch.Tensor, output: SamplerOutput
) -> None:
    """Args: logits, input_ids: on the CPU. output: of a GPU."""
    num_rows = len(sequences)
    expected = sample(logits, sequences, input_ids)
    torch.cuda.synchronize()
    assert output.token_ids.tolist() == expected.token_ids.tolist()
    assert (output.logprobs is None) == (expected.logprobs is None)
    if output.logprobs is None or expected.logprobs is None:
        return
    assert (
        output.logprobs.chosen.is_pinned() and output.logprobs.top.is_pinned() and output.logprobs.top_ids.is_pinned()
    )
    rows = zip(output.logprobs.to_rows(num_rows), expected.logprobs.to_rows(num_rows), strict=True)
    for found, wanted in rows:
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert [t.token_id for t in found.top] == [t.token_id for t in wanted.top]
            assert [t.logprob for t in found.top] == pytest.approx([t.logprob for t in wanted.top], abs=1e-4)


# The second size does not divide into even pieces.
@pytest.mark.parametrize("vocab_size", [151_936, 3_001])
def test_gpu_samples_the_cpu_s_tokens_without_waiting(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    sequences = [any_sequence(rng, any_params(rng, vocab_size), vocab_size) for _ in range(96)]
    logits = torch.randn(len(sequences), vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    input_ids = torch.tensor(rng.choices(range(vocab_size), k=len(sequences)))
    on_gpu, input_ids_on_gpu = logits.cuda(), input_ids.cuda()
    # Set up kernels and libraries.
    sample(on_gpu, sequences, input_ids_on_gpu)
    with no_waiting():
        output = sample(on_gpu, sequences, input_ids_on_gpu)
    assert_like_the_cpu(logits, sequences, input_ids, output)
    assert torch.equal(on_gpu.cpu(), logits)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(1),
        SamplingParams(1, num_logprobs=3),
        SamplingParams(1, temperature=1.0),
        SamplingParams(1, temperature=1.0, top_k=20),
        SamplingParams(1, temperature=1.0, top_p=0.9),
        SamplingParams(1, temperature=1.0, top_k=50, top_p=0.9, min_p=0.01),
        SamplingParams(1, temperature=1.0, repetition_penalty=1.1),
        SamplingParams(1, logit_bias=((7, 4.0),)),
        SamplingParams(1, allowed_token_ids=(31_999, 5, 64)),
        SamplingParams(1, temperature=1.0, allowed_token_ids=(31_999, 5, 64), num_logprobs=2, logprob_token_ids=(7, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_rows", [1, 32])
def test_batches_with_equal_sampling(sampling: SamplingParams, num_rows: int) -> None:
    vocab_size = 32_000
    rng = random.Random(num_rows)
    sequences = [any_sequence(rng, sampling, vocab_size) for _ in range(num_rows)]
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(2)) * 3
    input_ids = torch.tensor(rng.choices(range(vocab_size), k=num_rows))
    on_gpu, input_ids_on_gpu = logits.cuda(), input_ids.cuda()
    sample(on_gpu, sequences, input_ids_on_gpu)
    with no_waiting():
        output = sample(on_gpu, sequences, input_ids_on_gpu)
    assert_like_the_cpu(logits, sequences, input_ids, output)


def test_ties_do_not_depend_on_the_batch() -> None:
    """torch's choice among equal values depends on the number of rows."""
    vocab_size = 32_000
    filters = itertools.product([0, 1, 50, 1024, 1025], [1.0, 0.9, 0.5])
    sequences = [
        TokenSequence([1], 1, [], sampling=SamplingParams(1, 1.0, top_k, top_p, seed=i, num_logprobs=20))
        for i, (top_k, top_p) in enumerate(list(filters) * 6)
    ]
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(len(sequences), vocab_size, generator=generator) * 3).bfloat16().float().cuda()
    together = sample(logits, sequences)
    alone = [sample(logits[i : i + 1], [s]) for i, s in enumerate(sequences)]
    torch.cuda.synchronize()
    assert together.token_ids.tolist() == [a.token_ids.item() for a in alone]
    assert together.logprobs is not None
    rows = [a.logprobs.to_rows(1)[0] for a in alone if a.logprobs is not None]
    assert together.logprobs.to_rows(len(sequences)) == rows
