"""Batches that measure an engine, or compile its kernels, before it serves."""

from pathlib import Path

import pytest

from tandem.engine.models.config import ModelConfig
from tandem.engine.trial_batches import FEW_TOKENS, NUM_PROMPTS, TrialBatches
from tandem.sampling_params import SamplingParams

SAMPLING = SamplingParams(max_tokens=1)


@pytest.fixture
def trials(model_dir: str) -> TrialBatches:
    return TrialBatches(ModelConfig.from_dir(Path(model_dir)))


def test_prefills_alternate_in_prefix_and_number_of_prompts(trials: TrialBatches) -> None:
    batches = list(trials.prefills(64 * 20))
    assert [b.num_tokens for b in batches] == list(range(64, 64 * 20, 64))
    assert [b.sequences[0].cached_len for b in batches[:4]] == [0, 1, 0, 1]
    assert [len(b.sequences) for b in batches[1:3]] == list(NUM_PROMPTS[1:3])


def test_large_prefills_differ_by_larger_steps(trials: TrialBatches) -> None:
    sizes = [b.num_tokens for b in trials.prefills(FEW_TOKENS + 300)]
    assert sizes[-4:] == [FEW_TOKENS - 64, FEW_TOKENS, FEW_TOKENS + 128, FEW_TOKENS + 256]


def test_steps_are_below_the_largest(trials: TrialBatches) -> None:
    assert [len(b.sequences) for b in trials.steps(64)] == [1, 2, 4, 8, 16, 32]
    assert [len(b.sequences) for b in trials.steps(64, [32, 64, 128])] == [32]


def test_drafts_fill_the_rows(trials: TrialBatches) -> None:
    batch = trials.drafted(9, 3, SAMPLING)
    assert [len(s.draft_ids) for s in batch.sequences] == [3, 3, 0] and batch.num_tokens == 9


def test_mixed_batches_have_both_kinds(trials: TrialBatches) -> None:
    batch = trials.mixed(3, 10, 2, SAMPLING)
    assert (len(batch.decoded), len(batch.prompts), batch.num_tokens) == (3, 2, 13)
