"""Embeddings on a GPU against transformers: every backend, chunks and cached prefixes, beside graphs of all kinds."""

import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.embedding import EmbeddingParams
from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.embeddings import pool_prompts
from tandem.engine.engine import Engine
from tandem.engine.output import Feed
from tandem.engine.token_sequence import TokenSequence
from tandem.sampling_params import SamplingParams
from tests.cluster.conftest import VOCAB_SIZE, Oracle
from tests.gpu.engine.test_sampler import no_waiting

pytestmark = pytest.mark.usefixtures("all_prefill_graphs")
PAGE_SIZE = 16
NUM_TOKENS = 300
PROMPT = random.Random(1).choices(range(VOCAB_SIZE), k=NUM_TOKENS)
CHUNKS = [[NUM_TOKENS], [100, 1, 198, 1], [16] * 18 + [12]]
# This model's states vary much: transformers in bfloat16 is as far off.
LEAST_COSINE = {"float32": 0.9999, "bfloat16": 0.99}


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> torch.Tensor:
    return torch.tensor(Oracle(model_dir).embedding(PROMPT))


def build(model_dir: Path, dtype: str = "bfloat16", **options: Any) -> Engine:
    config = EngineConfig(str(model_dir), device="cuda", dtype=dtype, num_pages=400, **options)
    return build_engine(config, "embedding", lambda doing: None)


def sequence_of(token_ids: Sequence[int], first_page: int, embedding: EmbeddingParams | None = None) -> TokenSequence:
    pages = range(first_page, first_page + len(token_ids) // PAGE_SIZE + 3)
    return TokenSequence([*token_ids], len(token_ids), pages, sampling=SamplingParams(50), embedding=embedding)


def to_embed(token_ids: Sequence[int], first_page: int) -> TokenSequence:
    return sequence_of(token_ids, first_page, EmbeddingParams())


def embed(engine: Engine, one: TokenSequence, chunks: Sequence[int]) -> torch.Tensor:
    for chunk in chunks:
        one.extend(chunk)
        output = engine.forward(Batch("prefill", [one]))
        one.complete_extend()
    [values] = output.embeddings()
    return vector(values)


def vector(values: bytes | None) -> torch.Tensor:
    assert values is not None
    return torch.tensor(array("f", values))


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.cosine_similarity(one, other, dim=0))


@pytest.mark.parametrize("chunks", CHUNKS, ids=["whole", "odd", "pages"])
@pytest.mark.parametrize(
    ("dtype", "backend"),
    [("float32", "auto"), ("bfloat16", "flashinfer"), ("bfloat16", "triton"), ("bfloat16", "auto")],
)
def test_hidden_states_equal_transformers(
    model_dir: Path, expected: torch.Tensor, dtype: str, backend: str, chunks: list[int]
) -> None:
    engine = build(model_dir, dtype, attention_backend=backend)
    found = embed(engine, to_embed(PROMPT, 0), chunks)
    assert cosine(found, expected) > LEAST_COSINE[dtype] and float(found.norm()) == pytest.approx(1.0, abs=1e-4)
    # All pages but the last are there already.
    again = to_embed(PROMPT, 0)
    again.cached_len = again.device_len = (NUM_TOKENS - 1) // PAGE_SIZE * PAGE_SIZE
    assert cosine(embed(engine, again, [again.remaining_len]), found) > 0.999


def test_pages_of_8_bits(model_dir: Path) -> None:
    engine = build(model_dir, kv_cache_dtype="fp8_e4m3")
    whole = embed(engine, to_embed(PROMPT, 0), [NUM_TOKENS])
    plain = embed(build(model_dir), to_embed(PROMPT, 0), [NUM_TOKENS])
    assert cosine(whole, plain) > 0.9


def test_only_the_last_chunk_leaves_the_prefill_graphs(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(model_dir)
    assert engine._prefill_graphs is not None and engine._prefill_graphs.fit(NUM_TOKENS)
    launched: list[int] = []
    run = engine._run
    monkeypatch.setattr(engine, "_run", lambda batch, *rest: (launched.append(batch.num_tokens), run(batch, *rest))[1])
    by_graphs = embed(engine, to_embed(PROMPT, 0), [200, 60, 40])
    assert launched == [40]
    alone = embed(build(model_dir, cuda_graph_max_bs=0), to_embed(PROMPT, 0), [200, 60, 40])
    assert cosine(by_graphs, alone) > 0.999


def decode(engine: Engine, *, between: bool = False, beside: bool = False) -> tuple[list[int], list[torch.Tensor]]:
    """Decode 12 tokens by graphs, each step fed by the previous one.

    Args:
        between, beside: embed prompts between steps, or in the same forward pass as some.
    """
    decoded = sequence_of(PROMPT[:40], 0)
    decoded.extend(40)
    output = engine.forward(Batch("prefill", [decoded]))
    decoded.complete_extend()
    token_ids, embeddings = output.token_ids(), []
    decoded.token_ids.append(token_ids[0])
    feed: Feed | None = None
    for step in range(12):
        prompts = []
        if between and step % 3 == 1:
            embeddings.append(embed(engine, to_embed(PROMPT, 50 + 30 * step), [NUM_TOKENS]))
        if beside and step % 3 == 2:
            # No graph can run it.
            prompts = [to_embed(PROMPT, 50 + 30 * step)]
            prompts[0].extend(NUM_TOKENS)
        decoded.extend(1)
        output = engine.forward(Batch.of([decoded], prompts, feed))
        decoded.complete_extend()
        decoded.num_pending = 1
        if prompts:
            embeddings.append(vector(output.embeddings()[1]))
        token_ids += output.token_ids()[:1]
        if len(decoded.token_ids) < len(token_ids) - 1 + 40:
            decoded.token_ids.append(token_ids[-2])
        feed = Feed(output, [0])
    return token_ids, embeddings


@pytest.mark.parametrize("mixed_steps", [False, True])
def test_decoding_by_graphs_goes_on_beside_embeddings(
    model_dir: Path, expected: torch.Tensor, mixed_steps: bool
) -> None:
    engine = build(model_dir, mixed_steps=mixed_steps)
    plain, _ = decode(engine)
    found, embeddings = decode(engine, between=True, beside=mixed_steps)
    assert found == plain and len(embeddings) == (8 if mixed_steps else 4)
    for embedding in embeddings:
        assert cosine(embedding, expected) > LEAST_COSINE["bfloat16"]


def test_device_is_never_awaited(model_dir: Path) -> None:
    engine = build(model_dir, cuda_graph_max_bs=0)
    one = to_embed(PROMPT, 0)
    one.extend(NUM_TOKENS)
    batch = Batch("prefill", [one])
    hidden = torch.randn(1, engine.model.config.hidden_size, device="cuda", dtype=torch.bfloat16)
    pool_prompts(engine.model, hidden, batch)
    with no_waiting():
        pooled = pool_prompts(engine.model, hidden, batch)
    torch.cuda.synchronize()
    assert pooled.hidden.is_pinned()
    # A pass without a token to sample is done once its embedding has arrived.
    output = engine.forward(batch)
    assert output.token_ids() == [] and output.done()
    assert output.embeddings()[0] is not None
