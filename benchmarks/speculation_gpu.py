"""Measures speculation on one GPU, with random weights.

  python -m benchmarks.speculation_gpu costs --model DIRECTORY
  python -m benchmarks.speculation_gpu overlap --model DIRECTORY
  python -m benchmarks.speculation_gpu rates --model DIRECTORY
  python -m benchmarks.speculation_gpu arrivals --model DIRECTORY

costs: device time of a step with drafts, as times that of a step without; overlap: steps that overlap or not; rates:
tokens per second of a stream by acceptance; arrivals: gaps of 64 streams while prompts arrive. Each prints a table. All
run in one process if named together. The model's next token is always the last one plus 1, so drafts are right or
wrong as a script decides.
"""

import argparse
import json
import random
import statistics
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_loop import PAGE_SIZE, build_dummy_engine, open_model
from tandem.both_worker.local_worker import LocalWorker
from tandem.decode_worker import drafting
from tandem.decode_worker.config import AUTO_SPECULATION, NO_SPECULATION, DecodeConfig
from tandem.decode_worker.draft_policy import MAX_DRAFTS
from tandem.decode_worker.drafters.base import Drafter
from tandem.engine.batch import Batch
from tandem.engine.engine import Engine
from tandem.engine.token_sequence import TokenSequence
from tandem.garbage import collect_seldom, freeze_objects
from tandem.messages import Failed, Finished, FirstToken, GaveBack, PrefillDeferred, Tokens, WorkerMessage
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams

BATCH_SIZES = (1, 8, 32, 128)
DRAFTS = (1, 2, 4, 7, 8)
CONTEXT = 1024
NUM_WARMUPS, NUM_STEPS = 3, 11
CHANCES = (0.0, 0.5, 0.8, 1.0)
FORCED = (4,)
PROMPT_LEN = 128
# More than a run computes. Shares of a run, in seconds.
MAX_TOKENS = 4096
# Most that all compute on average, of the pool's size.
MAX_RUN_TOKENS = 2048
WARMUP_S, MEASURED_S = 1.5, 0.5
TIMEOUT_S = 120.0
# Streams beside prompts that arrive at equal intervals, in seconds.
STREAM, NUM_STREAMS = "s", 64
INTERVAL_S, ARRIVALS_S = 0.25, 6.0
ARRIVING_LEN, ARRIVING_TOKENS = 2048, 32
# Leaves a direction in the hidden state to the embedding alone.
DAMPING = 1e-3
# Without a policy.
ALL_DRAFTS = "ngram"

Table = list[dict[str, Any]]


class Guesses(Drafter):
    """Drafts that are right with a chance, each behind right ones, for `count_up`."""

    chance = 0.0
    vocab_size = 0
    rng = random.Random(0)

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        off = [0 if self.rng.random() < self.chance else 1 for _ in range(max_tokens)]
        return [(token_ids[-1] + 1 + i + off[i]) % self.vocab_size for i in range(max_tokens)]


@torch.inference_mode()
def count_up(engine: Engine) -> None:
    """Changes the weights so that each token's successor is the next id, by far. Other work stays the same."""
    parameters = dict(engine.model.named_parameters())
    for name, weight in parameters.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.mul_(DAMPING)
    parameters["model.norm.weight"].fill_(1.0)
    parameters["lm_head.weight"].copy_(parameters["model.embed_tokens.weight"].roll(1, 0))


def sequences_of(engine: Engine, batch_size: int, num_drafts: int) -> list[TokenSequence]:
    """Returns sequences whose contexts are random numbers of scattered pages."""
    rng, vocabulary = random.Random(batch_size), range(engine.model.config.vocab_size)
    num_pages = -(-(CONTEXT + num_drafts) // PAGE_SIZE)
    pages = rng.sample(range(engine.pool.num_pages), batch_size * num_pages)
    sequences = []
    for number in range(batch_size):
        table = array("i", pages[number * num_pages : (number + 1) * num_pages])
        sequence = TokenSequence(rng.choices(vocabulary, k=CONTEXT), CONTEXT, table, CONTEXT - 1)
        sequence.draft_ids = rng.choices(vocabulary, k=num_drafts)
        sequences.append(sequence)
    return sequences


def step_s(engine: Engine, batch_size: int, num_drafts: int) -> tuple[float, float]:
    """Returns the device's seconds of a step, and the host's of its launch."""
    sequences = sequences_of(engine, batch_size, num_drafts)
    device_s, host_s = [], []
    for _ in range(NUM_WARMUPS + NUM_STEPS):
        for sequence in sequences:
            sequence.device_len = sequence.cached_len
            sequence.extend(sequence.remaining_len)
        began = time.perf_counter()
        output = engine.forward(Batch("decode", sequences))
        host_s.append(time.perf_counter() - began)
        output.token_ids()
        device_s.append(output.duration_s())
    return statistics.median(device_s[NUM_WARMUPS:]), statistics.median(host_s[NUM_WARMUPS:])


def costs(engine: Engine, chances: Sequence[float]) -> Iterator[dict[str, Any]]:
    for batch_size in BATCH_SIZES:
        plain_s, host_s = step_s(engine, batch_size, 0)
        row: dict[str, Any] = {"batch": batch_size, "plain": f"{plain_s * 1e3:.3f} ms"}
        for num_drafts in DRAFTS:
            drafted_s, host_s = step_s(engine, batch_size, num_drafts)
            row[f"k={num_drafts}"] = f"{drafted_s / plain_s:.3f}"
        row["host's launch"] = f"{host_s * 1e3:.2f} ms"
        yield row


class Run:
    """Requests that decode together on one worker, some time after their first tokens.

    Attributes:
        step_s: seconds a step.
        rate: tokens a second of a stream.
    """

    def __init__(self, engine: Engine, batch_size: int, speculation: str, *, overlap: bool = True) -> None:
        self._num_first = self._num_tokens = self._num_steps = 0
        rng, vocab_size = random.Random(1), engine.model.config.vocab_size
        decode = DecodeConfig(batch_size, speculation=speculation, overlap=overlap)
        worker = LocalWorker(engine, PrefillConfig(8192), decode, self._take)
        scheduler = worker.scheduler._decode
        if isinstance(scheduler._drafting, drafting.Drafting):
            scheduler._drafting._drafter = Guesses
        names = [f"r{number}" for number in range(batch_size)]
        for name in names:
            worker.submit(name, rng.choices(range(vocab_size), k=PROMPT_LEN), SamplingParams(MAX_TOKENS))
        worker.run_until(lambda: self._num_first == batch_size, TIMEOUT_S)
        self._wait(worker, WARMUP_S)
        self._num_tokens = self._num_steps = 0
        seconds = self._wait(worker, MEASURED_S)
        self.step_s = seconds / self._num_steps
        self.rate = self._num_tokens / seconds / batch_size
        drafted = worker.scheduler.stats().drafted
        self.num_drafted = sum(one.num_tokens for one in drafted)
        self.num_accepted = sum(one.num_accepted for one in drafted)
        for name in names:
            worker.abort(name, 0)
        scheduler.collect_launched()

    def _wait(self, worker: LocalWorker, seconds: float) -> float:
        began = time.perf_counter()
        worker.run_until(lambda: time.perf_counter() - began > seconds, TIMEOUT_S)
        return time.perf_counter() - began

    def _take(self, message: WorkerMessage) -> None:
        if isinstance(message, GaveBack | Failed | PrefillDeferred | Finished):
            raise RuntimeError(f"a request ended early: {message}")
        self._num_first += isinstance(message, FirstToken)
        if isinstance(message, Tokens):
            self._num_steps += 1
            self._num_tokens += sum(len(event.token_ids) for event in message.events)


def overlap(engine: Engine, chances: Sequence[float]) -> Iterator[dict[str, Any]]:
    for batch_size in BATCH_SIZES:
        found = {
            name: Run(engine, batch_size, NO_SPECULATION, overlap=overlaps).step_s
            for name, overlaps in (("overlapping", True), ("not", False))
        }
        lost_s = found["not"] - found["overlapping"]
        yield {
            "batch": batch_size,
            **{name: f"{seconds * 1e3:.3f} ms" for name, seconds in found.items()},
            "lost": f"{lost_s * 1e3:.3f} ms ({lost_s / found['overlapping']:.1%})",
        }


def rates(engine: Engine, chances: Sequence[float]) -> Iterator[dict[str, Any]]:
    Guesses.vocab_size = engine.model.config.vocab_size
    for batch_size in BATCH_SIZES:
        off = Run(engine, batch_size, NO_SPECULATION).rate
        for chance in chances:
            Guesses.chance = chance
            auto = Run(engine, batch_size, AUTO_SPECULATION)
            # Clocks change with the load, so neighbors are compared.
            off = statistics.mean((off, again := Run(engine, batch_size, NO_SPECULATION).rate))
            row: dict[str, Any] = {
                "batch": batch_size,
                "acceptance": chance,
                "off": f"{off:.1f}",
                "auto": f"{auto.rate:.1f} ({auto.rate / off:.3f})",
                "auto's drafts, accepted": f"{auto.num_drafted}, {auto.num_accepted}",
            }
            off = again
            for forced in FORCED:
                drafting.MAX_DRAFTS = forced
                run = Run(engine, batch_size, ALL_DRAFTS)
                row[f"k={forced}"] = f"{run.rate:.1f} ({run.rate / off:.2f})"
            yield row


class Arrivals:
    """Running streams beside prompts that arrive.

    Attributes:
        gaps_s: of the streams, between messages with tokens.
    """

    def __init__(self, engine: Engine, speculation: str) -> None:
        self._num_first = 0
        self._last: dict[str, float] = {}
        self._is_measured = False
        self.gaps_s: list[float] = []
        rng, vocab_size = random.Random(2), engine.model.config.vocab_size
        worker = LocalWorker(engine, PrefillConfig(8192), DecodeConfig(128, speculation=speculation), self._take)
        scheduler = worker.scheduler._decode
        if isinstance(scheduler._drafting, drafting.Drafting):
            scheduler._drafting._drafter = Guesses
        names = [f"{STREAM}{number}" for number in range(NUM_STREAMS)]
        for name in names:
            worker.submit(name, rng.choices(range(vocab_size), k=PROMPT_LEN), SamplingParams(MAX_TOKENS))
        worker.run_until(lambda: self._num_first == NUM_STREAMS, TIMEOUT_S)
        began = time.perf_counter()
        due, number = began, 0
        while (now := time.perf_counter()) < began + WARMUP_S + ARRIVALS_S:
            self._is_measured = now > began + WARMUP_S
            if now >= due:
                prompt = rng.choices(range(vocab_size), k=ARRIVING_LEN)
                worker.submit(f"p{number}", prompt, SamplingParams(ARRIVING_TOKENS))
                due, number = due + INTERVAL_S, number + 1
            worker.step()
        for name in (*names, *(f"p{i}" for i in range(number))):
            worker.abort(name, 0)
        worker.run_until(lambda: not engine.launches and not worker.scheduler.stats().num_running, TIMEOUT_S)
        scheduler.collect_launched()

    def _take(self, message: WorkerMessage) -> None:
        if isinstance(message, GaveBack | Failed):
            raise RuntimeError(f"a request was not served: {message}")
        self._num_first += isinstance(message, FirstToken)
        if not isinstance(message, Tokens):
            return
        now = time.perf_counter()
        for event in message.events:
            if event.request_id.startswith(STREAM):
                if self._is_measured:
                    self.gaps_s.append(now - self._last[event.request_id])
                self._last[event.request_id] = now


def arrivals(engine: Engine, chances: Sequence[float]) -> Iterator[dict[str, Any]]:
    Guesses.vocab_size = engine.model.config.vocab_size
    runs = [(NO_SPECULATION, 0.0), *((AUTO_SPECULATION, chance) for chance in chances), (NO_SPECULATION, 0.0)]
    for speculation, chance in runs:
        Guesses.chance = chance
        gaps_s = sorted(Arrivals(engine, speculation).gaps_s)
        at = {f"p{share}": gaps_s[len(gaps_s) * share // 100] for share in (50, 90, 99)}
        yield {
            "speculation": speculation,
            "acceptance": chance if speculation == AUTO_SPECULATION else "",
            **{name: f"{seconds * 1e3:.2f} ms" for name, seconds in at.items()},
            "gaps": len(gaps_s),
        }


PARTS = {"costs": costs, "overlap": overlap, "rates": rates, "arrivals": arrivals}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=[*PARTS])
    parser.add_argument("--model", required=True, help="a directory with a model's config.json; its weights are random")
    parser.add_argument("--chances", type=float, nargs="+", default=CHANCES, help="acceptance of scripted drafts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    arguments = parser.parse_args(argv)
    open_model(parser, Path(arguments.model))
    began = time.perf_counter()
    engine = build_dummy_engine(
        arguments.model,
        lambda doing: None,
        num_pages=max(BATCH_SIZES) * (PROMPT_LEN + MAX_RUN_TOKENS) // PAGE_SIZE,
        cuda_graph_max_bs=max(BATCH_SIZES),
        max_chunk_tokens=8192,
        max_batch_size=max(BATCH_SIZES),
        max_drafts=MAX_DRAFTS,
        mixed_steps="arrivals" in arguments.parts,
        prefill_cuda_graphs="arrivals" in arguments.parts,
        max_model_len=PROMPT_LEN + MAX_TOKENS,
    )
    assert isinstance(engine, Engine)
    print(f"engine built in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    if engine.draft_costs is not None:
        print(f"times by rows: {engine.draft_costs}", file=sys.stderr, flush=True)
    count_up(engine)
    engine.pool.memory.view(torch.bfloat16).normal_()
    freeze_objects()
    collect_seldom()
    found: dict[str, Table] = {}
    for part in arguments.parts:
        found[part] = []
        for row in PARTS[part](engine, arguments.chances):
            if not found[part]:
                print(f"\n{part}\n| {' | '.join(row)} |\n{'|---' * len(row)}|")
            print(f"| {' | '.join(map(str, row.values()))} |", flush=True)
            found[part].append(row)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
