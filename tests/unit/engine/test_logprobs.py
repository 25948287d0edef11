import pytest
import torch

from tandem.engine.logprobs import SampledLogprobs
from tandem.engine.sampler import sample
from tandem.engine.token_sequence import TokenSequence
from tandem.sampling_params import MAX_LOGPROBS, SamplingParams, TokenLogprobs

VOCAB_SIZE = 40


def sequence(sampling: SamplingParams) -> TokenSequence:
    return TokenSequence([1, 2, 3], 3, [], sampling=sampling)


def random_logits(seed: int, num_rows: int = 1, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def rows_of(logprobs: SampledLogprobs | None, num_rows: int) -> list[TokenLogprobs | None]:
    return logprobs.to_rows(num_rows) if logprobs else [None] * num_rows


def test_logprobs_are_unbiased_and_only_on_request() -> None:
    asked = [None, 0, 3, MAX_LOGPROBS]
    rows = [
        sequence(SamplingParams(1, temperature=2.0, top_k=5, logit_bias=((3, 50.0),), num_logprobs=n)) for n in asked
    ]
    logits = random_logits(10, len(rows))
    output = sample(logits, rows)
    expected = logits.log_softmax(-1)
    for row, (n, logprobs) in enumerate(zip(asked, rows_of(output.logprobs, len(rows)), strict=True)):
        if n is None:
            assert logprobs is None
            continue
        assert logprobs is not None
        assert output.token_ids[row] == 3  # forced by its bias, which the log probability ignores
        assert logprobs.logprob == pytest.approx(expected[row, 3].item())
        descending = expected[row].sort(descending=True)
        assert [t.token_id for t in logprobs.top] == descending.indices[:n].tolist()
        assert [t.logprob for t in logprobs.top] == pytest.approx(descending.values[:n].tolist())


def test_among_equals_the_lower_token_ids_are_reported() -> None:
    logits = torch.zeros(3, 300)
    logits[:, 200] = logits[:, 100] = 1.0
    rows = [sequence(SamplingParams(1, num_logprobs=n)) for n in (1, 5, 20)]
    for n, logprobs in zip((1, 5, 20), rows_of(sample(logits, rows).logprobs, 3), strict=True):
        assert logprobs is not None
        assert [t.token_id for t in logprobs.top] == [100, 200, *range(18)][:n]


def test_named_tokens_are_reported_instead_of_the_most_likely() -> None:
    logits = random_logits(12, 4)
    expected = logits.log_softmax(-1)
    named = [(), (7, 3, 39), (5,), ()]
    asked = [2, 20, 0, None]
    params = [
        SamplingParams(1, num_logprobs=n, logprob_token_ids=ids, allowed_token_ids=(7,))
        for n, ids in zip(asked, named, strict=True)
    ]
    found = rows_of(sample(logits, [sequence(p) for p in params]).logprobs, 4)
    for row in (1, 2):
        logprobs = found[row]
        assert logprobs is not None and tuple(t.token_id for t in logprobs.top) == named[row]
        assert [t.logprob for t in logprobs.top] == pytest.approx(expected[row, list(named[row])].tolist())
        assert logprobs.logprob == pytest.approx(expected[row, 7].item())
    assert found[0] is not None and [t.token_id for t in found[0].top] == expected[0].topk(2).indices.tolist()
    assert found[3] is None


def test_vocabulary_smaller_than_the_requested_logprobs() -> None:
    output = sample(random_logits(11, 1, 5), [sequence(SamplingParams(1, num_logprobs=20))])
    (logprobs,) = rows_of(output.logprobs, 1)
    assert logprobs is not None and len(logprobs.top) == 5
