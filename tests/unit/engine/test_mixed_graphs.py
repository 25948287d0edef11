"""Choice and inputs of mixed graphs."""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch

from tandem.embedding import EmbeddingParams
from tandem.engine.attention.base import GraphableBackend
from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.layers.experts.counts import NUM_STAGED
from tandem.engine.mixed_graphs import MixedGraphs, MixedSizes, staged_numbers
from tandem.engine.mixed_sizes import NUM_DECODED, NUM_ROWS
from tandem.engine.output import Feed, ForwardOutput
from tandem.engine.prefill_graphs import MAX_PROMPTS
from tandem.engine.token_sequence import TokenSequence
from tandem.sampling_params import SamplingParams
from tests.fakes.graphs import FixedSizes, replay_in_torch
from tests.fakes.model_config import TINY_LLAMA

FIRST_STAGED = 1000


def test_sizes_are_close_and_graphs_few() -> None:
    largest = MixedSizes.up_to(256, 8192)
    assert largest.num_decoded == NUM_DECODED
    for sizes in (NUM_DECODED, *(beside for _, beside in largest.by_decoded)):
        assert all(smaller < larger <= 2 * smaller for smaller, larger in itertools.pairwise(sizes))
    assert len(largest.pairs()) <= 70 and largest.pairs()[0] == (256, 1024)
    assert len(largest.num_prompt_tokens) <= 46


def test_products_of_a_mixed_step_have_fitting_rows() -> None:
    for num_decoded, beside in MixedSizes.up_to(256, 8192).by_decoded:
        assert {max(16, num_decoded) + size for size in beside} <= set(NUM_ROWS)


@pytest.mark.parametrize(
    ("max_decoded", "max_prompt_tokens", "expected"),
    [
        (1, 1, MixedSizes.grid((1,), (112,))),
        (16, 112, MixedSizes.grid((16,), (112,))),
        (20, 97, MixedSizes(((16, (112,)), (20, (96, 160))))),
        (70, 128, MixedSizes(((16, (112, 176)), (32, (96, 160)), (64, (64, 128)), (70, (112, 176))))),
        (512, 64, MixedSizes((*MixedSizes.up_to(256, 64).by_decoded, (512, (128,))))),
    ],
)
def test_the_largest_step_and_the_largest_piece_have_a_graph(
    max_decoded: int, max_prompt_tokens: int, expected: MixedSizes
) -> None:
    sizes = MixedSizes.up_to(max_decoded, max_prompt_tokens)
    assert sizes == expected
    assert sizes.smallest(max_decoded, max_prompt_tokens) == sizes.pairs()[0]


def test_forward_runs_in_the_smallest_fitting_graph() -> None:
    sizes = MixedSizes.grid((16, 20), (128, 192))
    assert [sizes.smallest(*pair) for pair in ((1, 1), (16, 128), (17, 129), (20, 192))] == [
        (16, 128),
        (16, 128),
        (20, 192),
        (20, 192),
    ]
    assert sizes.smallest(21, 1) is None and sizes.smallest(1, 193) is None
    assert MixedSizes().smallest(1, 1) is None and not MixedSizes().pairs()


def test_chunks_are_cut_to_avoid_padding() -> None:
    sizes = MixedSizes.grid((16, 20), (128, 192))
    assert [sizes.num_unpadded(20, n) for n in (127, 128, 191, 192)] == [127, 128, 128, 192]
    assert sizes.num_unpadded(20, 193) == 193 and sizes.num_unpadded(21, 150) == 150
    assert MixedSizes().num_unpadded(1, 150) == 150
    assert [sizes.num_padded(20, n) for n in (1, 128, 129, 192, 193)] == [128, 128, 192, 192, 193]
    assert sizes.num_padded(21, 150) == 150


def sequence(token_ids: list[int], num_tokens: int, num_pending: int = 0) -> TokenSequence:
    """Return a sequence whose last `num_tokens` tokens this forward pass computes."""
    s = TokenSequence(token_ids, 1, [0], cached_len=len(token_ids) + num_pending - num_tokens, num_pending=num_pending)
    s.extend(num_tokens)
    return s


def unpacked(numbers: "np.ndarray[tuple[int], np.dtype[np.int64]]", num_tokens: int) -> tuple[list[int], ...]:
    """Return tokens, their indices, the rows that need logits, and the rows that experts count."""
    ids, index, rows, counted = np.split(numbers, [num_tokens, 2 * num_tokens, len(numbers) - NUM_STAGED])
    return ids.tolist(), index.tolist(), rows.tolist(), counted.view(np.int32).tolist()


@pytest.mark.parametrize("is_fed", [False, True])
def test_staged_indices_name_each_token_and_wanted_row(is_fed: bool) -> None:
    decoded = [sequence([1, 2], 1), sequence([3] if is_fed else [3, 4], 1, int(is_fed)), sequence([5, 6], 1)]
    ends, goes_on = sequence([10, 11, 12], 3), sequence([20, 21, 22], 3)
    # A chunk that does not reach its prompt's end has no row.
    goes_on.device_len -= 1
    feed = Feed(cast(ForwardOutput, None), [-1, 7, -1]) if is_fed else None
    batch = Batch.of(decoded, [goes_on, ends], feed)
    numbers = staged_numbers(batch, batch.logits_rows(), 4, 8, FIRST_STAGED)
    ids, index, rows, counted = unpacked(numbers, 12)
    assert ids == [2, 0 if is_fed else 4, 6, 0, 20, 21, 10, 11, 12, 0, 0, 0]
    assert index == [FIRST_STAGED, 7 if is_fed else FIRST_STAGED + 1, *range(FIRST_STAGED + 2, FIRST_STAGED + 12)]
    # Decoded sequences come first, without gaps, as later feeds expect.
    assert rows == [0, 1, 2, 8, *[0] * MAX_PROMPTS]
    assert counted == [3, 4, 9, 4, 0, 0]


def test_a_full_graph_has_no_padding() -> None:
    batch = Batch.of([sequence([1, 2], 1)], [sequence([n, n + 1], 2) for n in range(MAX_PROMPTS)])
    ids, index, rows, counted = unpacked(staged_numbers(batch, batch.logits_rows(), 1, 32, 17), 33)
    assert ids == batch.known_ids() and index == list(range(17, 17 + 33))
    assert rows == [0, *range(2, 33, 2)]
    assert counted == [1, 1, 33, 1 + MAX_PROMPTS, 0, 0]


# --- forward passes in plain torch, instead of graphs and kernels ---

CPU = torch.device("cpu")
PAGE_SIZE = 4
VOCAB_SIZE = cast(int, TINY_LLAMA["vocab_size"])


@pytest.fixture
def engine(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    replay_in_torch(monkeypatch)
    config = EngineConfig(
        model_dir, load_format="dummy", page_size=PAGE_SIZE, num_pages=100, num_threads=1, mixed_steps=True
    )
    engine = build_engine(config, "mixed-graphs", lambda doing: None)
    yield engine
    engine.pool.close()


def graphs_of(engine: Engine, sizes: MixedSizes) -> MixedGraphs:
    return MixedGraphs(engine.model, FixedSizes(engine.pool), CPU, sizes, 100, lambda doing: None)


def sequence_of(prompt_len: int, first_page: int, **sampling: Any) -> TokenSequence:
    prompt = random.Random(prompt_len).choices(range(VOCAB_SIZE), k=prompt_len)
    return TokenSequence(prompt, prompt_len, range(first_page, first_page + 10), sampling=SamplingParams(9, **sampling))


def decode_beside_prompts(
    engine: Engine, forward: Callable[[Batch, torch.Tensor], torch.Tensor]
) -> tuple[list[list[int]], torch.Tensor]:
    """Decode two sequences that swap places, each step fed by the previous one, beside prompts.

    Args:
        forward: takes a batch and its feed; returns the next tokens.

    Returns:
        Tokens of all steps, and the pages.
    """
    engine.pool.memory.zero_()
    decoded = [sequence_of(5, 0), sequence_of(9, 10)]
    prompt, late = sequence_of(12, 20), sequence_of(3, 30)
    for s in decoded:
        s.extend(s.remaining_len)
    fed_ids = torch.tensor(engine.forward(Batch("prefill", decoded)).token_ids())
    given = []
    for beside, num_tokens in ((prompt, 5), (prompt, 7), (late, 3)):
        for s in decoded:
            s.complete_extend()
            s.num_pending = 1
            s.extend(1)
        beside.extend(num_tokens)
        batch = Batch.of(decoded[::-1], [beside], Feed(cast(ForwardOutput, None), [1, 0]))
        known = fed_ids.tolist()
        fed_ids = forward(batch, fed_ids)
        given.append(fed_ids.tolist())
        fed_ids = fed_ids[:2]
        # The host learns the tokens a step later.
        for s, token_id in zip(decoded, known, strict=True):
            s.token_ids.append(token_id)
            s.num_pending = 0
        beside.complete_extend()
        decoded.reverse()
    return given, engine.pool.memory.view(torch.float32).clone()


@pytest.mark.parametrize("num_decoded", [(2,), (3, 7)])
def test_graph_matches_single_launches_and_feeds_the_next(engine: Engine, num_decoded: tuple[int, ...]) -> None:
    def launch(batch: Batch, fed_ids: torch.Tensor) -> torch.Tensor:
        return engine._run(batch, fed_ids, lambda: None).choose().token_ids

    expected, expected_pages = decode_beside_prompts(engine, launch)
    assert [len(token_ids) for token_ids in expected] == [2, 3, 3]
    graphs = graphs_of(engine, MixedSizes.grid(num_decoded, (6, 8)))
    fed: list[list[int]] = []

    def run(batch: Batch, fed_ids: torch.Tensor) -> torch.Tensor:
        fed.append(fed_ids.tolist())
        output = graphs.run(batch, fed_ids)
        assert output is not None and output.newest_ids is not None
        assert output.newest_ids[:2].tolist() == fed[-1][::-1]
        assert len(output.logits) == len(output.newest_ids) == len(output.most_likely)
        assert output.logits.argmax(dim=-1).equal(output.most_likely)
        return output.most_likely

    given, pages = decode_beside_prompts(engine, run)
    assert given == expected and torch.allclose(pages, expected_pages, atol=1e-5)
    # Earlier runs leave no trace.
    assert decode_beside_prompts(engine, run)[0] == expected


def test_forward_without_a_graph_is_launched_kernel_by_kernel(engine: Engine) -> None:
    graphs = graphs_of(engine, MixedSizes.grid((2,), (40,)))

    def runs(
        num_decoded: int,
        prompt_lens: Sequence[int],
        num_fed: int = 0,
        embedding: EmbeddingParams | None = None,
        num_left: int = 0,
        **sampling: Any,
    ) -> bool:
        decoded, prompts = [sequence_of(2, 0) for _ in range(num_decoded)], []
        for s in decoded:
            s.cached_len = s.device_len = 1
            s.num_pending = int(num_fed > 0)
            s.token_ids = s.token_ids[: 2 - s.num_pending]
            s.extend(1)
        for prompt_len in prompt_lens:
            prompts.append(sequence_of(prompt_len, 10, **sampling))
            prompts[-1].embedding = embedding
            prompts[-1].extend(prompt_len - num_left)
        feed = Feed(cast(ForwardOutput, None), [0] * num_decoded) if num_fed else None
        fed_ids = torch.zeros(num_fed, dtype=torch.int64) if num_fed else None
        return graphs.run(Batch.of(decoded, prompts, feed), fed_ids) is not None

    assert runs(2, [40]) and runs(1, [1] * MAX_PROMPTS) and runs(2, [3], num_fed=2)
    assert not runs(3, [40]) and not runs(2, [40, 1]) and not runs(1, [1] * (MAX_PROMPTS + 1))
    assert not runs(2, [3], num_fed=3)
    assert not runs(2, [3], num_prompt_logprobs=0)
    # Graphs keep no hidden states; only the last chunk needs them.
    assert not runs(2, [3], embedding=EmbeddingParams())
    assert runs(2, [3], embedding=EmbeddingParams(), num_left=1)


def test_a_backend_without_prefill_graphs_has_no_mixed_ones(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FixedSizes, "for_prefill_graphs", GraphableBackend.for_prefill_graphs)
    graphs = graphs_of(engine, MixedSizes.grid((2,), (40,)))
    assert graphs.sizes == MixedSizes()
    decoded, prompt = sequence_of(1, 0), sequence_of(3, 10)
    for s in (decoded, prompt):
        s.extend(s.remaining_len)
    assert graphs.run(Batch.of([decoded], [prompt]), None) is None
