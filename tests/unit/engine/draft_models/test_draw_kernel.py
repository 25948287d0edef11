"""The kernels that draw drafts, interpreted, against the sampler. Needs Triton and TRITON_INTERPRET=1."""

import os
import random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.engine.drafted_row import DraftedRow
from tandem.engine.randomness import uniform
from tandem.engine.sampler import sample
from tandem.engine.token_sequence import TokenSequence
from tandem.sampling_params import SamplingParams

# Triton reads it when it is imported.
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
PART = 32
POSITION = 3
FILTERS = [
    {},
    {"min_p": 0.1},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.01},
    {"top_p": 0.6},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"top_k": -1},
]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    language: Any = pytest.importorskip("triton").language
    from tandem.engine.draft_models import draw_kernel

    # Few tokens have many parts.
    monkeypatch.setattr(draw_kernel, "part_size", lambda num_logits: PART)
    # The interpreter has no functions of CUDA. It replaces Triton's while it runs.
    functions = SimpleNamespace(exp=lambda x: language.exp(x), log=lambda x: language.log(x))
    monkeypatch.setattr(draw_kernel, "libdevice", functions)
    return draw_kernel


def drawn(kernels: ModuleType, logits: torch.Tensor, params: list[SamplingParams], u: list[float]) -> list[int]:
    out = torch.zeros(len(params), dtype=torch.int64)
    # The second of three passes; others keep their tokens.
    us, tokens = torch.zeros(3, len(params), dtype=torch.float64), torch.full((3, len(params)), -1)
    us[1] = torch.tensor(u, dtype=torch.float64)
    kernels.draw_tokens(
        logits,
        torch.tensor([p.temperature for p in params], dtype=torch.float64),
        torch.tensor([p.top_k for p in params]),
        torch.tensor([p.top_p for p in params], dtype=torch.float64),
        torch.tensor([p.min_p for p in params], dtype=torch.float64),
        us,
        torch.tensor([1]),
        out,
        tokens,
        any(p.has_filters for p in params),
    )
    assert tokens.tolist() == [[-1] * len(params), out.tolist(), [-1] * len(params)]
    return out.tolist()


def assert_as_sampled(kernels: ModuleType, logits: torch.Tensor, params: list[SamplingParams]) -> None:
    rows = [DraftedRow(TokenSequence([1] * POSITION, POSITION, (), sampling=p), 0) for p in params]
    expected = sample(logits.float(), rows).token_ids.tolist()
    found = drawn(kernels, logits, params, [uniform(p.seed, POSITION) for p in params])
    assert found == expected, [p for p, a, b in zip(params, found, expected, strict=True) if a != b]


def random_params(rng: random.Random, num: int, is_filtered: bool) -> list[SamplingParams]:
    return [
        SamplingParams(
            9,
            temperature=rng.choice((0.0, 0.1, 0.7, 1.0, 2.0)),
            seed=rng.randrange(2**64),
            **(rng.choice(FILTERS) if is_filtered else FILTERS[rng.randrange(2)]),  # type: ignore[arg-type]
        )
        for _ in range(num)
    ]


@pytest.mark.parametrize("is_filtered", [False, True], ids=["plain", "filtered"])
@pytest.mark.parametrize("vocab_size", [1, 7, 32, 100, 161])
def test_drafts_are_the_samplers_tokens(kernels: ModuleType, vocab_size: int, is_filtered: bool) -> None:
    """At each spread of logits: all equal, many equal, few equal."""
    rng, generator = random.Random(vocab_size), torch.Generator().manual_seed(vocab_size)
    for spread in (0.0, 0.5, 5.0):
        for num_rows in (1, 6):
            params = random_params(rng, num_rows, is_filtered)
            logits = torch.randn(num_rows, vocab_size, generator=generator).mul_(spread).bfloat16()
            assert_as_sampled(kernels, logits, params)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_edges_of_logits(kernels: ModuleType, filters: dict[str, float]) -> None:
    """Forbidden tokens, whole parts of them, all mass on one token, equal tokens in several parts, both zeros."""
    logits = torch.full((5, 130), -torch.inf, dtype=torch.bfloat16)
    logits[0, 129] = -3.0
    logits[1, 40:70:3] = torch.randn(10, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits[2] = torch.randn(130, generator=torch.Generator().manual_seed(2)).bfloat16()
    logits[2, 64] = 300.0
    logits[3] = -1.0
    logits[3, 5::31] = 2.0
    logits[4, ::2], logits[4, 1::2] = 0.0, -0.0
    for seed in range(2):
        params = [SamplingParams(9, temperature=1.0, seed=5 * seed + row, **filters) for row in range(5)]  # type: ignore[arg-type]
        assert_as_sampled(kernels, logits, params)


def test_draws_at_the_ends_of_the_random_numbers(kernels: ModuleType) -> None:
    """The first and the last token with a mass, never one without."""
    logits = torch.zeros(1, 100, dtype=torch.bfloat16)
    logits[0, :35] = logits[0, 70:] = -torch.inf
    for filters, first, last in (({}, 35, 69), ({"top_p": 0.5}, 35, 52), ({"top_k": 3}, 35, 69)):
        params = [SamplingParams(9, temperature=1.0, **filters)]
        assert drawn(kernels, logits, params, [0.0]) == [first]
        assert drawn(kernels, logits, params, [1.0 - 2.0**-53]) == [last]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("filters", [{}, {"top_k": 3, "top_p": 0.5}], ids=str)
def test_no_row_leaves_the_vocabulary(kernels: ModuleType, filters: dict[str, float]) -> None:
    """Also with numbers that are not finite."""
    logits = torch.full((4, 70), -torch.inf, dtype=torch.bfloat16)
    logits[0] = torch.nan
    logits[2, 33] = torch.inf
    logits[3, 5], logits[3, 60] = torch.nan, 1.0
    for temperature in (0.0, 1.0):
        params = [SamplingParams(9, temperature=temperature, **filters)] * 4  # type: ignore[arg-type]
        assert all(0 <= token_id < 70 for token_id in drawn(kernels, logits, params, [0.999] * 4))
