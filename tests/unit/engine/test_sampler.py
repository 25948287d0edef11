"""The sampler against its formulas, transformers, and statistics."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from tandem.engine import draws
from tandem.engine.draws import MAX_SELECTED, Draws, filter_logits
from tandem.engine.logprobs import SampledLogprobs
from tandem.engine.randomness import uniform
from tandem.engine.sampler import process_logits, sample
from tandem.engine.token_sequence import TokenSequence
from tandem.sampling_params import SamplingParams, TokenLogprobs
from tests.fakes.sampling_params import any_sampling_params

VOCAB_SIZE = 40


def sequence(
    sampling: SamplingParams, prompt_ids: list[int] | None = None, output_ids: tuple[int, ...] = ()
) -> TokenSequence:
    prompt_ids = [1, 2, 3] if prompt_ids is None else prompt_ids
    return TokenSequence([*prompt_ids, *output_ids], len(prompt_ids), [], sampling=sampling)


def random_sequence(rng: random.Random, sampling: SamplingParams) -> TokenSequence:
    prompt_ids = rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 12))
    return sequence(sampling, prompt_ids, tuple(rng.choices(range(VOCAB_SIZE), k=rng.randint(0, 12))))


def random_logits(seed: int, num_rows: int = 1, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def chosen(logits: torch.Tensor, sequences: list[TokenSequence]) -> list[int]:
    return sample(logits, sequences).token_ids.tolist()


def filtered(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    return filter_logits(logits, Draws.of([sequence(p) for p in params], logits.shape[1], logits.device))


def rows_of(logprobs: SampledLogprobs | None, num_rows: int) -> list[TokenLogprobs | None]:
    return logprobs.to_rows(num_rows) if logprobs else [None] * num_rows


def spelled_out(logits: torch.Tensor, s: TokenSequence) -> tuple[int, float]:
    """Return a row's token by the sampler's formulas in float64, and the smallest margin of its comparisons."""
    p = s.sampling
    x = {i: float(v) for i, v in enumerate(logits.tolist())}
    if p.allowed_token_ids:
        x |= {i: -math.inf for i in x if i not in p.allowed_token_ids}
    if len(s.token_ids) - s.prompt_len < p.min_tokens:
        without_ends = x | {i: -math.inf for i in p.stop_token_ids if i in x}
        x = without_ends if max(without_ends.values()) > -math.inf else x
    for token_id, bias in p.logit_bias:
        x[token_id] += bias
    output = Counter(s.token_ids[s.prompt_len :])
    for i in set(s.token_ids):
        x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
    for i, count in output.items():
        x[i] -= p.frequency_penalty * count + p.presence_penalty
    descending = sorted(x, key=lambda i: (-x[i], i))
    if p.is_greedy:
        return descending[0], x[descending[0]] - x[descending[1]]
    top = x[descending[0]]
    weight = {i: math.exp((x[i] - top) / p.temperature) for i in descending}
    kept = [i for i in descending if weight[i] >= p.min_p]
    margins = [abs(weight[i] - p.min_p) for i in descending if 0 < p.min_p < 1]
    if p.top_k > 0 and len(kept) > p.top_k:
        dropped = [i for i in kept if x[i] < x[kept[p.top_k - 1]]]
        margins += [weight[kept[p.top_k - 1]] - weight[i] for i in dropped[:1]]
        kept = kept[: len(kept) - len(dropped)]
    if p.top_p < 1:
        nucleus: list[int] = []
        total, before = sum(weight[i] for i in kept), 0.0
        for i in kept:
            margins.append(abs(before / total - p.top_p) if nucleus else 1.0)
            if before / total >= p.top_p and nucleus:
                break
            nucleus.append(i)
            before += weight[i]
        # Rounding decides between nearly equal tokens.
        margins += [weight[nucleus[-1]] - weight[i] for i in kept[len(nucleus) :][:1] if x[i] < x[nucleus[-1]]]
        kept = nucleus
    total, u, so_far = sum(weight[i] for i in kept), uniform(p.seed, len(s.token_ids)), 0.0
    for i in sorted(kept):
        so_far += weight[i] / total
        margins.append(abs(so_far - u))
        if so_far > u:
            break
    return i, min(margins)


@settings(deadline=None)
@given(any_sampling_params(VOCAB_SIZE), st.integers(0, 10**6))
def test_tokens_match_the_formulas(sampling: SamplingParams, seed: int) -> None:
    logits = random_logits(seed)
    s = random_sequence(random.Random(seed), sampling)
    expected, margin = spelled_out(logits[0], s)
    assume(margin > 1e-5)
    assert chosen(logits, [s]) == [expected]


@st.composite
def any_filters(draw: st.DrawFn, vocab_size: int) -> SamplingParams:
    """Draw parameters that never make different logits equal."""
    params = draw(any_sampling_params(vocab_size))
    return SamplingParams(1, draw(st.floats(0.05, 5)), params.top_k, params.top_p, params.min_p, seed=params.seed)


@settings(deadline=None)
@given(any_filters(300), st.integers(0, 10**6), st.sampled_from([0, 20, MAX_SELECTED]))
def test_ties_follow_the_formulas(sampling: SamplingParams, seed: int, max_selected: int) -> None:
    logits = random_logits(seed, 1, 300).round()
    s = sequence(sampling)
    expected, margin = spelled_out(logits[0], s)
    assume(margin > 1e-5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draws, "MAX_SELECTED", max_selected)
        assert chosen(logits, [s]) == [expected]


def test_among_equals_top_k_keeps_all_and_top_p_the_lower_ids() -> None:
    flat = torch.zeros(4, 3000)
    params = [SamplingParams(1, 1.0, top_k, top_p) for top_k, top_p in [(5, 1.0), (5, 0.5), (0, 0.5), (2000, 0.0)]]
    assert [row.isfinite().nonzero().max().item() + 1 for row in filtered(flat, params)] == [3000, 1500, 1500, 1]
    assert filtered(flat, params).isfinite().sum(dim=-1).tolist() == [3000, 1500, 1500, 1]


def test_penalties_match_transformers() -> None:
    rng = random.Random(1)
    rows = [random_sequence(rng, SamplingParams(1, repetition_penalty=r)) for r in (0.5, 1.0, 1.3, 20.0)]
    logits = random_logits(1, len(rows))
    processed = process_logits(logits, rows)
    for row, s in enumerate(rows):
        processor = hf.RepetitionPenaltyLogitsProcessor(s.sampling.repetition_penalty)
        expected = processor(torch.tensor([s.token_ids]), logits[row : row + 1].clone())
        assert torch.equal(processed[row], expected[0])


@settings(deadline=None)
@given(
    st.lists(
        st.builds(
            SamplingParams,
            max_tokens=st.just(1),
            temperature=st.floats(0.1, 5),
            top_k=st.integers(0, VOCAB_SIZE + 2),
            # Between these, transformers' float32 cannot tell a sum's distance from 1.
            top_p=st.floats(0.01, 0.999) | st.just(1.0),
            min_p=st.floats(0, 1),
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 10**6),
)
def test_filters_match_transformers(params: list[SamplingParams], seed: int) -> None:
    logits = random_logits(seed, len(params))
    kept = filtered(logits, params)
    no_ids: torch.Tensor = torch.empty(1, 0)
    for row, p in enumerate(params):
        warpers = [hf.TemperatureLogitsWarper(p.temperature), hf.MinPLogitsWarper(p.min_p)]
        warpers += [hf.TopKLogitsWarper(p.top_k)] if p.top_k else []
        warpers += [hf.TopPLogitsWarper(p.top_p)] if p.top_p < 1 else []
        expected = logits[row : row + 1].clone()
        for warper in warpers:
            expected = warper(no_ids, expected)
        torch.testing.assert_close(kept[row].softmax(-1), expected[0].softmax(-1))
        assert torch.equal(kept[row].isinf(), expected[0].isinf())


@settings(deadline=None)
@given(st.lists(any_sampling_params(VOCAB_SIZE), min_size=2, max_size=8), st.integers(0, 10**6))
def test_row_does_not_depend_on_the_batch(params: list[SamplingParams], seed: int) -> None:
    rng = random.Random(seed)
    sequences = [random_sequence(rng, p) for p in params]
    logits = random_logits(seed, len(params))
    before = logits.clone()
    together = sample(logits, sequences)
    assert torch.equal(logits, before)
    alone = [sample(logits[i : i + 1], [s]) for i, s in enumerate(sequences)]
    assert together.token_ids.tolist() == [a.token_ids.item() for a in alone]
    assert rows_of(together.logprobs, len(params)) == [rows_of(a.logprobs, 1)[0] for a in alone]
    order = rng.sample(range(len(params)), len(params))
    assert chosen(logits[order], [sequences[i] for i in order]) == [together.token_ids[i].item() for i in order]


def test_row_does_not_depend_on_the_batch_in_large_vocabularies() -> None:
    rows = [sequence(SamplingParams(1, temperature=1.0, top_p=0.95, seed=i)) for i in range(16)]
    logits = random_logits(3, len(rows), 32_000)
    together = chosen(logits, rows)
    assert together == [chosen(logits[i : i + 1], [s])[0] for i, s in enumerate(rows)]
    assert len(set(together)) > 8


def test_selection_and_sorting_keep_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selected and sorted rows, with many equal logits, as in bfloat16."""
    filters = itertools.product([0, 1, 2, 50, 1024, 1025, 2500], [1.0, 0.9999999, 0.9, 0.5, 0.01], [0.0, 0.01])
    rows = [
        sequence(SamplingParams(1, 0.3 + i % 5, top_k, top_p, min_p, seed=i))
        for i, (top_k, top_p, min_p) in enumerate(filters)
    ]
    params = [s.sampling for s in rows]
    for granularity in (torch.float32, torch.bfloat16):
        logits = random_logits(12, len(rows), 3000).to(granularity).float()
        kept, tokens = filtered(logits, params), chosen(logits, rows)
        assert tokens == [chosen(logits[i : i + 1], [s])[0] for i, s in enumerate(rows)]
        for max_selected in (0, 60, 3000):
            with monkeypatch.context() as patch:
                patch.setattr(draws, "MAX_SELECTED", max_selected)
                assert torch.equal(filtered(logits, params), kept)
                assert chosen(logits, rows) == tokens


@settings(deadline=None)
@given(st.lists(any_sampling_params(VOCAB_SIZE), min_size=1, max_size=6), st.integers(0, 10**6))
def test_a_pending_token_counts_as_if_it_were_known(params: list[SamplingParams], seed: int) -> None:
    rng = random.Random(seed)
    known = [random_sequence(rng, p) for p in params]
    logits = random_logits(seed, len(params))
    pending = []
    for s in known:
        is_pending = len(s.token_ids) > s.prompt_len and rng.random() < 0.7
        token_ids = s.token_ids[:-1] if is_pending else s.token_ids
        pending.append(TokenSequence(token_ids, s.prompt_len, [], sampling=s.sampling, num_pending=int(is_pending)))
    newest = torch.tensor([s.token_ids[-1] for s in known])
    expected, output = sample(logits, known), sample(logits, pending, newest)
    assert torch.equal(output.token_ids, expected.token_ids)
    assert torch.equal(process_logits(logits, pending, newest), process_logits(logits, known))
    assert rows_of(output.logprobs, len(params)) == rows_of(expected.logprobs, len(params))


def test_restart_with_another_split_draws_the_same_token() -> None:
    sampling = SamplingParams(100, temperature=1.0, seed=5)
    logits = random_logits(4)
    one_life = sequence(sampling, [4, 5, 6], (7, 8))
    other_life = sequence(sampling, [4, 5, 6], (7,))
    other_life.token_ids.append(8)
    assert chosen(logits, [one_life]) == chosen(logits, [other_life])
    # Unlike the draw, penalties depend on the start of the output.
    penalised = replace(sampling, temperature=0.0, presence_penalty=2.0)
    flat = torch.zeros(1, VOCAB_SIZE)
    flat[0, 4], flat[0, 7] = 1.0, 1.5
    assert chosen(flat, [sequence(penalised, [4, 5, 6], (7, 8))]) == [4]
    assert chosen(flat, [sequence(penalised, [4, 5, 6, 7, 8])]) == [7]


def test_the_greedy_short_path_equals_the_general_one() -> None:
    plain = SamplingParams(1)
    rows = [sequence(plain) for _ in range(50)]
    logits = random_logits(5, len(rows))
    logits[:, 7] = logits[:, 30] = logits.max() + 1  # the lowest id among equals
    logits[25:] = random_logits(6, 25)
    short = chosen(logits, rows)
    assert set(short[:25]) == {7}
    assert short == chosen(logits, [*rows[:-1], sequence(replace(plain, num_logprobs=0))])
    assert short == chosen(logits, [*rows[:-1], sequence(replace(plain, top_k=3, top_p=0.5, min_p=0.5, seed=9))])
    nearly = SamplingParams(1, temperature=2e-5)
    assert short[25:] == chosen(logits[25:], [sequence(replace(nearly, seed=i)) for i in range(25)])


def test_a_batch_without_rows_to_sample() -> None:
    assert chosen(torch.empty(0, VOCAB_SIZE), []) == []


@pytest.mark.parametrize("only_one", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}])
def test_filters_keep_the_most_likely_token(only_one: dict[str, float]) -> None:
    logits = random_logits(7, 20)
    rows = [sequence(SamplingParams(1, temperature=3.0, seed=i, **only_one)) for i in range(20)]  # type: ignore[arg-type]
    assert chosen(logits, rows) == logits.argmax(-1).tolist()


def test_range_limits_are_harmless() -> None:
    extreme = [
        SamplingParams(1, temperature=1e-5, repetition_penalty=100.0, logit_bias=((0, 100.0), (1, -100.0))),
        SamplingParams(1, temperature=1e30, repetition_penalty=0.01, presence_penalty=-2.0, frequency_penalty=-2.0),
        SamplingParams(1, temperature=1.0, top_k=10**9, seed=2**64 - 1),
    ]
    logits = torch.full((3, VOCAB_SIZE), -80.0)
    logits[:, ::3] = 80.0
    logits[:, 5] = -torch.inf
    kept = filtered(process_logits(logits, [sequence(p) for p in extreme]), extreme)
    assert not kept.isnan().any() and (kept.amax(-1) == 0).all()
    assert all(0 <= i < VOCAB_SIZE and i != 5 for i in chosen(logits, [sequence(p) for p in extreme]))


@pytest.mark.parametrize("vocab_size", [1, 127, 128, 129, 2**17])
@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_extreme_random_numbers_pick_extreme_kept_tokens(
    monkeypatch: pytest.MonkeyPatch, vocab_size: int, top_p: float
) -> None:
    rows = [sequence(SamplingParams(1, temperature=1.0, top_p=top_p))]
    flat = torch.zeros(1, vocab_size)
    monkeypatch.setattr(draws, "uniform", lambda seed, position: 0.0)
    assert chosen(flat, rows) == [0]
    monkeypatch.setattr(draws, "uniform", lambda seed, position: 1 - 2**-53)
    assert chosen(flat, rows) == [math.ceil(top_p * vocab_size) - 1]


def test_bias_bans_and_forces() -> None:
    logits = random_logits(8)
    best = int(logits.argmax())
    assert chosen(logits, [sequence(SamplingParams(1, logit_bias=((best, -100.0),)))]) != [best]
    rows = [sequence(SamplingParams(1, temperature=1.0, seed=i, logit_bias=((11, 100.0),))) for i in range(20)]
    assert chosen(logits.expand(20, -1), rows) == [11] * 20


class UnreadBias(tuple[tuple[int, float], ...]):
    def __iter__(self) -> Iterator[tuple[int, float]]:
        raise AssertionError("a step goes through all biases")


def test_step_does_not_iterate_biases() -> None:
    logits = random_logits(8, num_rows=3)
    bias = ((3, -100.0), (11, 100.0))
    rows = [sequence(SamplingParams(1)), sequence(SamplingParams(1, logit_bias=bias)), sequence(SamplingParams(1))]
    object.__setattr__(rows[1].sampling, "logit_bias", UnreadBias(bias))
    assert chosen(logits, rows) == [int(logits[0].argmax()), 11, int(logits[2].argmax())]


@pytest.mark.parametrize("more", [{}, {"temperature": 1.0, "seed": 3}, {"presence_penalty": 2.0}])
def test_only_allowed_tokens_are_chosen(more: dict) -> None:
    """Beside rows that allow every token, and with a pending token."""
    vocab_size = 100
    logits = random_logits(5, 4, vocab_size)
    allowed = [(), (31, 32), (99, 64, 64), (0,)]
    rows = [sequence(SamplingParams(9, allowed_token_ids=ids, **more)) for ids in allowed]
    expected = chosen(logits, [sequence(SamplingParams(9, **more))] * 4)
    found = chosen(logits, rows)
    assert found[0] == expected[0]
    assert all(token_id in ids for token_id, ids in zip(found[1:], allowed[1:], strict=True))
    assert chosen(logits[1:2], rows[1:2])[0] in (31, 32), "alone"
    for row in rows:
        row.num_pending = 1
    again = sample(logits, rows, torch.tensor([1, 2, 3, 4])).token_ids.tolist()
    assert all(token_id in ids for token_id, ids in zip(again[1:], allowed[1:], strict=True))


def test_a_step_with_allowed_tokens_and_grammars() -> None:
    class EvenOnly:
        """Stands for the grammars: allows even tokens."""

        def follow(self, outputs: list) -> None:
            pass

        def masks(self, constraints: list) -> np.ndarray:
            return np.full((len(constraints), 2), 0x55555555, dtype=np.int32)

    class Unfollowed:
        error = ""

        def follow(self, token_ids: list[int], prompt_len: int) -> None:
            pass

    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, 37] = 9
    logits[:, 36], logits[:, 35] = 8, 7
    rows = [sequence(SamplingParams(9)) for _ in range(3)]
    rows[0].constraint = Unfollowed()  # type: ignore[assignment]
    rows[1] = sequence(SamplingParams(9, allowed_token_ids=(1, 35)))
    grammars: Any = EvenOnly()
    rows[0].sampling = SamplingParams(9, grammar="x", stop_token_ids=(0,))
    assert sample(logits, rows, None, grammars).token_ids.tolist() == [36, 35, 37]


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


# Seeds at one position and positions of one seed must both look independent.
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_distribution(vary: str) -> None:
    num_draws, vocab_size = 20_000, 16
    logits = random_logits(9, 1, vocab_size) / 3
    sampling = SamplingParams(1, temperature=0.8, top_k=12)
    if vary == "seed":
        rows = [sequence(replace(sampling, seed=i)) for i in range(num_draws)]
    else:
        rows = [sequence(sampling, [0] * (1 + i % 2000), (0,) * (i // 2000 * 2000)) for i in range(2000)]
    tokens = chosen(logits.expand(len(rows), -1), rows)
    probabilities = filtered(logits, [sampling])[0].double().softmax(-1).numpy()
    counts = np.bincount(tokens, minlength=vocab_size)
    kept = probabilities > 0
    assert kept.sum() == 12 and counts[~kept].sum() == 0
    # 11 degrees of freedom: above 35 once in 4,000.
    assert chi_square(counts[kept], probabilities[kept] * len(rows)) < 35


def ending(min_tokens: int, **more: object) -> SamplingParams:
    """Return parameters with token 5 by far the most likely, and 5 and 7 as stop tokens."""
    return SamplingParams(9, min_tokens=min_tokens, stop_token_ids=(7, 5), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("more", [{}, {"temperature": 1.0, "seed": 3}, {"logit_bias": ((5, 100.0),)}])
@pytest.mark.parametrize("penalties", [{}, {"repetition_penalty": 0.1, "presence_penalty": -2.0}])
def test_output_does_not_end_before_min_tokens(more: dict, penalties: dict) -> None:
    logits = random_logits(1, 5)
    logits[:, 5], logits[:, 7], logits[:, 9] = 100, 90, 60
    rows = [sequence(ending(3, **more, **penalties), output_ids=(5,) * n) for n in range(5)]
    assert chosen(logits, rows) == [9, 9, 9, 5, 5]
    # Logprobs are of the model's own logits.
    asked = [sequence(replace(row.sampling, num_logprobs=1), output_ids=tuple(row.token_ids[3:])) for row in rows]
    for logprobs in rows_of(sample(logits, asked).logprobs, 5):
        assert logprobs is not None and logprobs.top[0].token_id == 5


def test_pending_token_counts_toward_min_tokens() -> None:
    logits = random_logits(2, 2)
    logits[:, 5], logits[:, 9] = 100, 50
    rows = [sequence(ending(2), output_ids=(1,)), sequence(ending(2))]
    for row in rows:
        row.num_pending = 1
    assert sample(logits, rows, torch.tensor([1, 1])).token_ids.tolist() == [5, 9]


def test_rows_past_min_tokens_take_the_short_path(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [sequence(ending(1), output_ids=(1,)), sequence(replace(ending(1), stop_token_ids=()))]
    monkeypatch.setattr("tandem.engine.sampler.process_logits", None)
    assert chosen(random_logits(3, 2), rows) == random_logits(3, 2).argmax(-1).tolist()


def test_output_ends_if_only_end_tokens_are_allowed() -> None:
    logits = torch.full((1, VOCAB_SIZE), -torch.inf)
    logits[0, 7] = 1.0
    assert chosen(logits, [sequence(ending(3))]) == [7]


def test_unknown_stop_tokens_do_not_affect_other_rows() -> None:
    logits = random_logits(4, 2)
    params = replace(ending(3), stop_token_ids=(VOCAB_SIZE + 3, 2**31))
    assert chosen(logits, [sequence(params), sequence(params)]) == logits.argmax(-1).tolist()
