"""The engine on a GPU, with graphs and single launches, against the reference backend."""

import random
from pathlib import Path

import pytest
import torch

from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.graph_runner import GraphOutput
from tandem.engine.mixed_graphs import MixedSizes
from tandem.engine.output import Feed, ForwardOutput
from tandem.engine.token_sequence import TokenSequence
from tandem.sampling_params import SamplingParams
from tests.cluster.conftest import VOCAB_SIZE

pytestmark = pytest.mark.usefixtures("all_prefill_graphs")
PAGE_SIZE = 16
GREEDY = SamplingParams(1)
SCORED = SamplingParams(1, num_logprobs=0)


def build(
    model_dir: Path,
    *,
    graphs: int,
    prefill_graphs: bool = False,
    backend: str = "auto",
    mixed: bool = False,
    kv_cache_dtype: str = "auto",
) -> Engine:
    config = EngineConfig(
        str(model_dir),
        device="cuda",
        dtype="bfloat16",
        num_pages=200,
        attention_backend=backend,
        cuda_graph_max_bs=graphs,
        prefill_cuda_graphs=prefill_graphs,
        mixed_steps=mixed,
        kv_cache_dtype=kv_cache_dtype,
    )
    return build_engine(config, "test", lambda doing: None)


def generate(engine: Engine, prompt_lens: list[int], num_tokens: int, sampling: SamplingParams) -> list[list[int]]:
    rng = random.Random(0)
    free = list(range(200))
    sequences = []
    for prompt_len in prompt_lens:
        num_pages = (prompt_len + num_tokens) // PAGE_SIZE + 1
        pages = [free.pop() for _ in range(num_pages)]
        prompt = rng.choices(range(VOCAB_SIZE), k=prompt_len)
        sequences.append(TokenSequence(prompt, prompt_len, pages, sampling=sampling))
    for sequence in sequences:
        sequence.extend(sequence.remaining_len)
    output = engine.forward(Batch("prefill", sequences))
    for _ in range(num_tokens):
        for sequence, token_id in zip(sequences, output.token_ids(), strict=True):
            sequence.complete_extend()
            sequence.token_ids.append(token_id)
            sequence.extend(1)
        output = engine.forward(Batch("decode", sequences))
    assert output.done() or output.token_ids()
    return [s.token_ids[s.prompt_len :] for s in sequences]


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
@pytest.mark.parametrize("num_sequences", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingParams(1, temperature=1.0, seed=3, num_logprobs=2),
        SamplingParams(1, allowed_token_ids=(5, 90, 200), num_logprobs=0, logprob_token_ids=(7, 3)),
    ],
    ids=str,
)
def test_graphs_match_single_launches(
    model_dir: Path, num_sequences: int, sampling: SamplingParams, backend: str
) -> None:
    prompt_lens = [5, 33, 16, 90, 1, 48, 64, 17, 31][:num_sequences]
    with_graphs = build(model_dir, graphs=8, backend=backend)
    without = build(model_dir, graphs=0, backend=backend)
    pages_before = with_graphs.pool.memory.clone()
    expected = generate(without, prompt_lens, 24, sampling)
    assert generate(with_graphs, prompt_lens, 24, sampling) == expected
    assert not torch.equal(with_graphs.pool.memory, pages_before)
    # Unused pages are unchanged: padding writes go to the dummy page.
    num_used = sum((n + 24) // PAGE_SIZE + 1 for n in prompt_lens)
    assert not with_graphs.pool.memory[: 200 - num_used].any()


def test_bfloat16_logits_are_as_close_as_the_reference_backends(model_dir: Path) -> None:
    engines = [build(model_dir, graphs=0, backend=name) for name in ("flashinfer", "triton", "reference")]
    outputs = [generate(engine, [100], 1, SamplingParams(1, num_logprobs=5)) for engine in engines]
    assert [len(o[0]) for o in outputs] == [1, 1, 1]


def prefill(engine: Engine, chunks: list[tuple[int, int]]) -> tuple[torch.Tensor, list[float]]:
    """Compute each prompt in two forward passes; return the pages and the top logprobs.

    Args:
        chunks: each prompt's tokens in the first and in the second forward pass.
    """
    rng = random.Random(0)
    sequences = []
    num_pages = 0
    for first, second in chunks:
        prompt = rng.choices(range(VOCAB_SIZE), k=first + second)
        pages = range(num_pages, num_pages + (first + second) // PAGE_SIZE + 1)
        num_pages += len(pages)
        sequences.append(TokenSequence(prompt, len(prompt), list(pages), sampling=SCORED))
    for part in range(2):
        for sequence, chunk in zip(sequences, chunks, strict=True):
            sequence.extend(chunk[part])
        output = engine.forward(Batch("prefill", sequences))
        output.token_ids()
        for sequence in sequences:
            sequence.complete_extend()
    assert not engine.pool.memory[num_pages:].any()
    return engine.pool.memory[:num_pages].view(torch.bfloat16).float(), [p.logprob for p in output.logprobs() if p]


@pytest.mark.parametrize(
    "chunks",
    [[(1, 1)], [(16, 100)], [(5, 9), (33, 1), (120, 7)], [(1 + i, 3) for i in range(16)], [(300, 211)]],
    ids=str,
)
def test_prefill_graphs_match_single_launches(model_dir: Path, chunks: list[tuple[int, int]]) -> None:
    with_graphs = build(model_dir, graphs=0, prefill_graphs=True)
    assert with_graphs._prefill_graphs is not None
    num_runs = 0
    run = with_graphs._prefill_graphs.run

    def counted(batch: Batch) -> GraphOutput | None:
        nonlocal num_runs
        output = run(batch)
        num_runs += output is not None
        return output

    with_graphs._prefill_graphs.run = counted  # type: ignore[method-assign]
    pages, logprobs = prefill(with_graphs, chunks)
    assert num_runs == 2
    expected_pages, expected_logprobs = prefill(build(model_dir, graphs=0), chunks)
    assert torch.allclose(pages, expected_pages, atol=0.05, rtol=0.05)
    assert logprobs == pytest.approx(expected_logprobs, abs=0.05)


def decode_beside_a_prompt(engine: Engine, *, mixed: bool) -> list[float]:
    """Decode beside a prompt in chunks, in mixed or separate steps.

    Returns the logprobs of all sampled tokens by step, the prompt's own last.
    """
    rng = random.Random(1)

    def sequence(prompt_len: int, first_page: int) -> TokenSequence:
        prompt, pages = rng.choices(range(VOCAB_SIZE), k=prompt_len), list(range(first_page, first_page + 10))
        return TokenSequence(prompt, prompt_len, pages, sampling=SCORED)

    decoded, prompt = [sequence(length, 10 * i) for i, length in enumerate((5, 33, 90))], sequence(130, 100)
    for s in decoded:
        s.extend(s.remaining_len)
    engine.forward(Batch("prefill", decoded)).token_ids()
    logprobs: list[float] = []
    last: list[float] = []
    for num_tokens in (1, 40, 3, 86):
        for s in decoded:
            s.complete_extend()
            s.token_ids += rng.choices(range(VOCAB_SIZE), k=1)
            s.extend(1)
        prompt.extend(num_tokens)
        batches = [Batch.of(decoded, [prompt])] if mixed else [Batch("decode", decoded), Batch("prefill", [prompt])]
        found = [p.logprob for batch in batches for p in engine.forward(batch).logprobs() if p]
        prompt.complete_extend()
        logprobs += found[:3]
        last = found[3:]
    assert len(last) == 1
    return logprobs + last


@pytest.mark.parametrize("backend", ["flashinfer", "triton", "reference"])
@pytest.mark.parametrize("graphs", [0, 8])
def test_mixed_forward_matches_two_forwards(model_dir: Path, backend: str, graphs: int) -> None:
    engine = build(model_dir, graphs=graphs, backend=backend)
    apart, mixed = (torch.tensor(decode_beside_a_prompt(engine, mixed=mixed)) for mixed in (False, True))
    assert_close(mixed, apart)


def assert_close(
    logprobs: torch.Tensor, expected: torch.Tensor, *, in_8_bits: bool = False, mean: float = 0.03
) -> None:
    """Compare with tolerance: rounding depends on the number of rows, logits are large, and 8-bit pages differ more."""
    factor = 3 if in_8_bits else 1
    assert (logprobs - expected).abs().mean() < mean * factor
    assert torch.allclose(logprobs, expected, atol=0.2 * factor, rtol=0)


def count_mixed_graphs(engine: Engine) -> list[bool]:
    """Record for each later mixed step whether it ran as a graph."""
    assert engine._mixed_graphs is not None and engine._mixed_graphs.sizes.pairs()
    seen: list[bool] = []
    run = engine._mixed_graphs.run

    def counted(batch: Batch, fed_ids: torch.Tensor | None) -> GraphOutput | None:
        output = run(batch, fed_ids)
        seen.append(output is not None)
        return output

    engine._mixed_graphs.run = counted  # type: ignore[method-assign]
    return seen


# Three sequences fill the first graph and are padded in the others; 520 exceeds the decode kernel's limit.
@pytest.mark.parametrize(
    ("graphs", "kv_cache_dtype"), [(3, "auto"), (3, "fp8_e4m3"), (8, "auto"), (8, "fp8_e4m3"), (520, "auto")]
)
def test_mixed_graph_matches_two_forwards(model_dir: Path, graphs: int, kv_cache_dtype: str) -> None:
    def run(engine: Engine, *, mixed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.tensor(decode_beside_a_prompt(engine, mixed=mixed))
        return logprobs, engine.pool.memory.clone()

    engine = build(model_dir, graphs=graphs, prefill_graphs=True, mixed=True, kv_cache_dtype=kv_cache_dtype)
    if graphs > 8:
        # Keep only this size, which FlashInfer's kernel decodes.
        keep_largest_step(engine)
    seen = count_mixed_graphs(engine)
    logprobs, pages = run(engine, mixed=True)
    assert seen == [True] * 4
    expected, expected_pages = run(build(model_dir, graphs=0, kv_cache_dtype=kv_cache_dtype), mixed=False)
    assert_close(logprobs, expected, in_8_bits=kv_cache_dtype != "auto")
    assert pages.view(200, -1).any(dim=1).equal(expected_pages.view(200, -1).any(dim=1))
    again, _ = run(engine, mixed=True)
    assert again.equal(logprobs)


def keep_largest_step(engine: Engine) -> None:
    """Run small mixed steps in the largest graphs."""
    assert engine._mixed_graphs is not None
    sizes = engine._mixed_graphs.sizes
    engine._mixed_graphs.sizes = MixedSizes(sizes.by_decoded[-1:])


def test_a_backend_without_prefill_graphs_has_no_mixed_ones(model_dir: Path) -> None:
    engine = build(model_dir, graphs=8, prefill_graphs=True, backend="triton", mixed=True)
    assert engine._mixed_graphs is not None and not engine._mixed_graphs.sizes.pairs()
    apart, mixed = (torch.tensor(decode_beside_a_prompt(engine, mixed=mixed)) for mixed in (False, True))
    assert_close(mixed, apart)


def test_steps_beyond_mixed_graphs_are_launched(model_dir: Path) -> None:
    engine = build(model_dir, graphs=2, prefill_graphs=True, mixed=True)
    seen = count_mixed_graphs(engine)
    apart, mixed = (torch.tensor(decode_beside_a_prompt(engine, mixed=mixed)) for mixed in (False, True))
    # Three sequences are decoded.
    assert seen == [False] * 4
    assert_close(mixed, apart)


class Chain:
    """Consecutive forward passes, fed by the previous one or with tokens from the host."""

    def __init__(self, engine: Engine, sampling: SamplingParams, *, feeds: bool) -> None:
        self._engine = engine
        self._feeds = feeds
        self._rng = random.Random(5)
        self._free = list(range(200))
        self._sampling = sampling
        self._decoded: list[TokenSequence] = []
        self._output: ForwardOutput | None = None
        self.token_ids: list[list[int]] = []

    def add(self, prompt_len: int) -> TokenSequence:
        pages = [self._free.pop() for _ in range(prompt_len // PAGE_SIZE + 2)]
        prompt = self._rng.choices(range(VOCAB_SIZE), k=prompt_len)
        return TokenSequence(prompt, prompt_len, pages, sampling=self._sampling)

    def begin(self, prompt_lens: list[int]) -> None:
        self._decoded = [self.add(prompt_len) for prompt_len in prompt_lens]
        for s in self._decoded:
            s.extend(s.remaining_len)
        newest = self._engine.forward(Batch("prefill", self._decoded)).token_ids()
        for s, token_id in zip(self._decoded, newest, strict=True):
            s.complete_extend()
            s.token_ids.append(token_id)

    def step(self, prompt: TokenSequence | None = None, num_tokens: int = 0) -> None:
        """Decode one token of each sequence, in a different order each time."""
        decoded = self._decoded[1:] + self._decoded[:1]
        feed = None
        if self._feeds and self._output is not None:
            feed = Feed(self._output, [self._decoded.index(s) for s in decoded])
        for s in decoded:
            s.extend(1)
        if prompt is not None:
            prompt.extend(num_tokens)
        before, self._output = self._output, self._engine.forward(Batch.of(decoded, [prompt] if prompt else [], feed))
        if self._feeds:
            self._take(before)
        for s in decoded:
            s.complete_extend()
            s.num_pending = 1
        if prompt is not None:
            prompt.complete_extend()
        self._decoded = decoded
        if not self._feeds:
            self._take(self._output)

    def _take(self, output: ForwardOutput | None) -> None:
        if output is None:
            return
        newest = output.token_ids()
        self.token_ids.append(newest)
        for s, token_id in zip(self._decoded, newest, strict=False):
            s.token_ids.append(token_id)
            s.num_pending = 0

    def end(self) -> list[list[int]]:
        if self._feeds:
            self._take(self._output)
        return self.token_ids


@pytest.mark.parametrize("is_graph", [True, False])
@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingParams(1, temperature=1.0, seed=3, repetition_penalty=1.3, num_logprobs=2),
        SamplingParams(1, temperature=1.0, seed=3, allowed_token_ids=(5, 90, 200), num_logprobs=0),
    ],
    ids=str,
)
def test_mixed_graphs_feed_and_are_fed(model_dir: Path, sampling: SamplingParams, is_graph: bool) -> None:
    """Mixed graphs feed decode graphs, each other, and forward passes without graphs."""
    engine = build(model_dir, graphs=8, prefill_graphs=True, mixed=True)
    graphs = engine._mixed_graphs
    seen = count_mixed_graphs(engine)

    def run(*, feeds: bool) -> list[list[int]]:
        chain = Chain(engine, sampling, feeds=feeds)
        chain.begin([5, 33, 90])
        prompt, late = chain.add(60), chain.add(9)
        chain.step()
        chain.step(prompt, 20)
        chain.step(prompt, 40)
        chain.step()
        # This step runs kernel by kernel, between two graphs.
        engine._mixed_graphs = graphs if is_graph else None
        chain.step(late, 4)
        engine._mixed_graphs = graphs
        chain.step(late, 5)
        chain.step()
        return chain.end()

    fed = run(feeds=True)
    assert seen == [True] * (4 if is_graph else 3)
    assert [len(token_ids) for token_ids in fed] == [3, 3, 4, 3, 3, 4, 3]
    # Same batches in the same graphs, so rounding is the same.
    assert fed == run(feeds=False)
