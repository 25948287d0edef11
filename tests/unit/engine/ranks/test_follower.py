"""Followers of an engine, on ranks as threads, against an engine of one rank."""

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch

from tandem.both_worker.local_worker import LocalWorker
from tandem.decode_worker.config import NO_SPECULATION, DecodeConfig
from tandem.decode_worker.speculation import LOOKUP
from tandem.embedding import EmbeddingParams
from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.batch import Batch
from tandem.engine.collectives.base import Collectives
from tandem.engine.collectives.gloo import GlooCollectives
from tandem.engine.draft_graphs import DraftGraphs
from tandem.engine.engine import Engine
from tandem.engine.graph_runner import DecodeGraphs
from tandem.engine.kvcache.base import Completion
from tandem.engine.kvcache.page_table import PageTable
from tandem.engine.kvcache.pool import CpuKvPool
from tandem.engine.models.build import build_model
from tandem.engine.models.config import ModelConfig
from tandem.engine.output import Feed, ForwardOutput
from tandem.engine.page_layout import page_layout_of
from tandem.engine.ranks.config import SINGLE_RANK
from tandem.engine.ranks.follower import FollowerLoop
from tandem.engine.ranks.progress import Progress
from tandem.engine.ranks.recorder import ForwardRecorder
from tandem.engine.ranks.ring import Ring
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.weights.loader import load_weights
from tandem.messages import Finished, Tokens, WorkerMessage
from tandem.prefill_worker.config import PrefillConfig
from tandem.prompt_logprobs import PackedLogprobs
from tandem.sampling_params import ALL_LOGPROBS, SamplingParams
from tests.fakes.graphs import NUM_HEADS, FixedSizes, replay_in_torch
from tests.fakes.rank_threads import ThreadCollectives, ThreadGroup, run_ranks

CPU = torch.device("cpu")
PAGE_SIZE = 4
_names = itertools.count()


class Memory:
    """What the ranks share."""

    def __init__(self, degree: int) -> None:
        self.ring = Ring(memoryview(bytearray(Ring.num_bytes(degree - 1))), degree - 1, timeout_s=20.0)
        self.progress = Progress(memoryview(bytearray(Progress.num_bytes(degree))), degree)


def engine_of(model_dir: str, collectives: Collectives | None, memory: Memory | None = None) -> Engine:
    config = ModelConfig.from_dir(Path(model_dir))
    model = build_model(config, torch.float32, CPU, collectives)
    load_weights(model, Path(), "dummy", None, CPU, lambda doing: None)
    ranks = SINGLE_RANK if collectives is None else collectives.ranks
    layout = page_layout_of(config, PAGE_SIZE, "float32", "auto").shard(ranks.rank, ranks.degree)
    pool = CpuKvPool(layout, 64, f"follower-{next(_names)}")
    launches = None
    if memory is not None and ranks.is_leader:
        launches = ForwardRecorder(memory.ring, memory.progress, PAGE_SIZE)
    attention = ReferenceAttention(pool, config.num_q_heads // ranks.degree)
    return Engine(model, pool, attention, mixed_steps=True, ranks=launches)


class Step(NamedTuple):
    """Attributes: embeddings: of each sequence."""

    token_ids: list[int]
    logprobs: list[float | None]
    prompt_logprobs: list[PackedLogprobs | None]
    embeddings: list[bytes | None]


class Driver:
    """Launches each forward pass before it reads the tokens of the one before."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.steps: list[Step] = []
        self.outputs: list[ForwardOutput] = []
        self._sampled: list[TokenSequence] = []
        self._first_page = 0

    def prompt(self, length: int, **sampling: Any) -> TokenSequence:
        params = SamplingParams(max_tokens=9, num_logprobs=0, **sampling)
        pages = PageTable(range(self._first_page, self._first_page + 6))
        self._first_page += 6
        token_ids = [(7 * i + length) % 32 for i in range(length)]
        return TokenSequence(token_ids, length, pages, sampling=params, table_id=self._first_page)

    def launch(self, decoded: Sequence[TokenSequence], prompts: Sequence[tuple[TokenSequence, int]] = ()) -> None:
        for sequence in decoded:
            sequence.extend(1)
        for sequence, num_tokens in prompts:
            sequence.extend(num_tokens)
        last = self._sampled
        feed = None
        if any(s.num_pending for s in decoded):
            rows = [last.index(s) if s.num_pending else -1 for s in decoded]
            # Only decoded sequences feed.
            feed = Feed(self.outputs[-1], rows)
        batch = Batch.of(decoded, [s for s, _ in prompts], feed)
        output = self.engine.forward(batch)
        sampled = [s for s in batch.sequences if s.needs_logits]
        for sequence in batch.sequences:
            sequence.complete_extend()
        self._collect()
        self.outputs.append(output)
        self._sampled = sampled
        for sequence in sampled:
            sequence.num_pending = 1

    def _collect(self) -> None:
        if not self.outputs:
            return
        output = self.outputs[-1]
        token_ids = output.token_ids()
        logprobs = [None if found is None else round(found.logprob, 4) for found in output.logprobs()]
        self.steps.append(Step(token_ids, logprobs, output.prompt_logprobs(), output.embeddings()))
        for sequence, token_id in zip(self._sampled, token_ids, strict=True):
            sequence.token_ids.append(token_id)
            sequence.num_pending = 0

    def run(self) -> list[Step]:
        first, second = self.prompt(13), self.prompt(5, temperature=1.0, seed=3, repetition_penalty=1.5)
        self.launch([], [(first, 6)])
        self.launch([], [(first, 7), (second, 5)])
        self._settle()
        self.launch([first, second])
        self.launch([first, second])
        scored = self.prompt(11, num_prompt_logprobs=2)
        everything = self.prompt(12, num_prompt_logprobs=ALL_LOGPROBS)
        # No chunk ends here, so no row needs logits but those of log probabilities.
        self.launch([first, second], [(scored, 4)])
        # A page of the tree replaces one of the request's own.
        pool = self.engine.pool
        assert isinstance(pool, CpuKvPool) and isinstance(first.page_ids, PageTable)
        pool.memory[60] = pool.memory[first.page_ids[0]]
        first.page_ids.replace(0, 60)
        self.launch([first], [(scored, 7), (everything, 12)])
        self._settle()
        embedded = self.prompt(9)
        embedded.embedding = EmbeddingParams()
        self.launch([second, first, scored], [(embedded, 9)])
        self.launch([scored, second])
        self._settle()
        return self.steps

    def _settle(self) -> None:
        self._collect()
        self.outputs, self._sampled = [], []


def on_ranks(
    degree: int, run: Callable[[ThreadGroup, ThreadCollectives, Memory], Any], memory: Memory | None = None
) -> list[Any]:
    shared = memory or Memory(degree)

    def of_rank(group: ThreadGroup, collectives: ThreadCollectives) -> Any:
        try:
            return run(group, collectives, shared)
        except BaseException:
            shared.progress.abort()
            raise

    return run_ranks(degree, of_rank)


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_every_kind_of_forward_pass_gives_the_results_of_one_rank(kind: str, model_dir: str, tmp_path: Path) -> None:
    expected = Driver(engine_of(model_dir, None)).run()

    def run(group: ThreadGroup, collectives: Collectives, memory: Memory) -> list[Step] | int:
        if kind == "gloo":
            collectives = GlooCollectives(group.ranks, tmp_path / "store", 20.0)
        engine = engine_of(model_dir, collectives, memory)
        if not group.ranks.is_leader:
            FollowerLoop(engine, memory.ring, memory.progress).run()
            return engine.pool.num_pages
        steps = Driver(engine).run()
        memory.progress.stop()
        return steps

    leader, _ = on_ranks(2, run)
    assert [step.token_ids for step in leader] == [step.token_ids for step in expected]
    for ours, theirs in zip(leader, expected, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
        assert len(ours.prompt_logprobs) == len(theirs.prompt_logprobs)
        for mine, other in zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True):
            assert (mine is None) == (other is None)
            if mine is not None and other is not None:
                assert (mine.start, mine.ranks, mine.top_ids) == (other.start, other.ranks, other.top_ids)
        found, wanted = (
            torch.tensor(bytearray(b"".join(e or b"" for e in step.embeddings))) for step in (ours, theirs)
        )
        torch.testing.assert_close(found.view(torch.float32), wanted.view(torch.float32), atol=1e-4, rtol=1e-4)


def _numbers(step: Step) -> torch.Tensor:
    """All embeddings of a step."""
    return torch.tensor(bytearray(b"".join(e or b"" for e in step.embeddings)), dtype=torch.uint8).view(torch.float32)


class _Held(Completion):
    def __init__(self, released: threading.Event) -> None:
        self._released = released

    def done(self) -> bool:
        return self._released.is_set()


def test_a_forward_pass_is_done_once_the_slowest_rank_has_completed_it(
    model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, follow = threading.Event(), Engine.follow

    def follow_slowly(self: Engine, *args: Any) -> Completion:
        follow(self, *args)
        return _Held(released)

    monkeypatch.setattr(Engine, "follow", follow_slowly)

    def run(group: ThreadGroup, collectives: Collectives, memory: Memory) -> list[bool]:
        engine = engine_of(model_dir, collectives, memory)
        if not group.ranks.is_leader:
            FollowerLoop(engine, memory.ring, memory.progress).run()
            return []
        driver = Driver(engine)
        driver.launch([], [(driver.prompt(5), 5)])
        output = driver.outputs[-1]
        tokens = output.token_ids()
        while memory.progress.beats() < [20]:
            threading.Event().wait(0.001)
        found = [len(tokens) == 1, output.done()]
        released.set()
        memory.progress.stop()
        while not output.done():
            threading.Event().wait(0.001)
        return found

    assert on_ranks(2, run)[0] == [True, False]


def test_graphs_of_all_ranks_find_the_tokens_of_one_rank(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replay_in_torch(monkeypatch)

    def decode(collectives: Collectives | None) -> list[list[int]]:
        engine = engine_of(model_dir, collectives)
        driver = Driver(engine)
        sequences = [driver.prompt(5), driver.prompt(6)]
        num_heads = NUM_HEADS if collectives is None else NUM_HEADS // collectives.ranks.degree
        attention = FixedSizes(engine.pool, num_heads)
        graphs = DecodeGraphs(engine.model, attention, CPU, 4, 6, lambda doing: None)
        for sequence in sequences:
            sequence.extend(sequence.length - 1)
        engine.forward(Batch("prefill", sequences))
        for sequence in sequences:
            sequence.complete_extend()
            sequence.extend(1)
        first = graphs.run(Batch("decode", sequences), None)
        assert first is not None
        steps = [first.most_likely.tolist()]
        for sequence in sequences:
            sequence.complete_extend()
            sequence.num_pending = 1
            sequence.extend(1)
        fed_ids = first.most_likely
        if collectives is not None:
            # A follower has the tokens in memory of its own.
            fed_ids = fed_ids if collectives.ranks.is_leader else torch.zeros(2, dtype=torch.int64)
            collectives.broadcast(fed_ids)
        fed = graphs.run(Batch("decode", sequences, Feed(cast(ForwardOutput, None), [1, 0])), fed_ids)
        assert fed is not None
        return [*steps, fed.most_likely.tolist()]

    leader, _ = on_ranks(2, lambda group, collectives, memory: decode(collectives))
    assert leader == decode(None)


def outputs_of(engine: Engine, speculation: str) -> tuple[dict[str, list[int]], int]:
    """Returns the tokens of requests that repeat themselves, and the number of accepted drafts."""
    rng, tokens, ended = random.Random(5), dict[str, list[int]](), set[str]()

    def take(message: WorkerMessage) -> None:
        if isinstance(message, Tokens):
            for event in message.events:
                tokens.setdefault(event.request_id, []).extend(event.token_ids)
        elif isinstance(message, Finished):
            ended.add(message.request_id)

    worker = LocalWorker(engine, PrefillConfig(8), DecodeConfig(speculation=speculation), take)
    for number in range(5):
        # Two allowed tokens repeat each other also where a model is random.
        chance: dict[str, Any] = {"temperature": 1.0, "seed": number, "allowed_token_ids": (3, 9)} if number % 2 else {}
        worker.submit(f"r{number}", rng.choices(range(32), k=4) * 3, SamplingParams(24, **chance))
    worker.run_until(lambda: len(ended) == 5, 60.0)
    assert worker.scheduler.check_integrity() == ""
    return tokens, sum(one.num_accepted for one in worker.scheduler.stats().drafted)


@pytest.mark.parametrize("has_graphs", [False, True], ids=["launches", "graphs"])
def test_drafts_on_several_ranks_give_the_tokens_of_one(
    has_graphs: bool, model_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay_in_torch(monkeypatch)
    launch, num_graphs = Engine._run, 0

    def prefer_graph(self: Engine, batch: Batch, fed_ids: torch.Tensor | None, meanwhile: Callable[[], None]) -> Any:
        nonlocal num_graphs
        launched = self._run_graph(batch, fed_ids)
        num_graphs += launched is not None
        return launched or launch(self, batch, fed_ids, meanwhile)

    monkeypatch.setattr(Engine, "_run", prefer_graph)
    expected, _ = outputs_of(engine_of(model_dir, None), NO_SPECULATION)

    def run(group: ThreadGroup, collectives: Collectives, memory: Memory) -> tuple[dict[str, list[int]], int] | None:
        engine = engine_of(model_dir, collectives, memory)
        if has_graphs:
            attention = FixedSizes(engine.pool, NUM_HEADS // group.ranks.degree)
            engine._draft_graphs = DraftGraphs(engine.model, attention, CPU, [2, 8, 40], 16, lambda doing: None)
        if not group.ranks.is_leader:
            FollowerLoop(engine, memory.ring, memory.progress).run()
            return None
        found = outputs_of(engine, LOOKUP)
        memory.progress.stop()
        return found

    tokens, num_accepted = on_ranks(2, run)[0]
    assert tokens == expected and num_accepted > 10
    assert (num_graphs > 10) == has_graphs


def test_a_follower_with_another_graph_ends(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph_of = Engine.graph_of

    def disagree(self: Engine, batch: Batch, num_fed: int) -> Any:
        graph = graph_of(self, batch, num_fed)
        return graph if self.model.samples else graph._replace(num_decoded=8)

    monkeypatch.setattr(Engine, "graph_of", disagree)

    def run(group: ThreadGroup, collectives: Collectives, memory: Memory) -> None:
        engine = engine_of(model_dir, collectives, memory)
        if group.ranks.is_leader:
            driver = Driver(engine)
            driver.launch([], [(driver.prompt(5), 5)])
        else:
            FollowerLoop(engine, memory.ring, memory.progress).run()

    with pytest.raises(RuntimeError, match=r"^ranks disagree about a CUDA graph"):
        on_ranks(2, run)


def test_a_follower_ends_if_another_rank_has(model_dir: str) -> None:
    def run(group: ThreadGroup, collectives: Collectives, memory: Memory) -> str:
        engine = engine_of(model_dir, collectives, memory)
        if group.ranks.is_leader:
            memory.progress.abort()
            return ""
        with pytest.raises(ConnectionError, match="has ended"):
            FollowerLoop(engine, memory.ring, memory.progress).run()
        return "ended"

    assert on_ranks(2, run)[1] == "ended"
