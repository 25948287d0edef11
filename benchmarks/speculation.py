"""Measures speculation on a CPU: acceptance and speed on code edits, JSON extraction, chat and agent traces.

Requests of a kind run on one worker of role both with one thread: without speculation, with all drafts of n-grams, and
with those that the policy takes.
Times are of the process's CPU, so other load on the host counts little. An output that differs is counted: as between
batch sizes, rounding of logits may change a token that lies on the edge of another.

  python -m benchmarks.speculation
  python -m benchmarks.speculation --sources

With --sources, no speculation runs: outputs without it are replayed with each source of drafts, up to 7 a step.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.draft_sources import replays
from tandem.both_worker.local_worker import LocalWorker
from tandem.decode_worker import drafting
from tandem.decode_worker.config import DecodeConfig
from tandem.decode_worker.drafters.base import Drafter
from tandem.decode_worker.speculation import AUTO_SPECULATION, NO_SPECULATION
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.weights.resolve import resolve_model
from tandem.messages import Drafted, Finished, FirstToken, Tokens, WorkerMessage
from tandem.prefill_worker.config import PrefillConfig
from tandem.sampling_params import SamplingParams

SPECULATIONS = ("ngram", AUTO_SPECULATION)
TIMEOUT_S = 600.0
TEMPERATURES = (0.0, 0.7)
CODE = """import json
from pathlib import Path


def load_users(path):
    users = json.loads(Path(path).read_text())
    result = []
    for user in users:
        if user["active"]:
            result.append({"name": user["name"], "email": user["email"], "age": user["age"]})
    return result


def save_users(path, users):
    Path(path).write_text(json.dumps(users, indent=2))
"""
RECORDS = """Ada Lovelace, born 1815 in London, mathematician. Alan Turing, born 1912 in London, computer scientist.
Grace Hopper, born 1906 in New York, computer scientist. Edsger Dijkstra, born 1930 in Rotterdam, physicist."""
TRACE = """You control a shell. Answer with one call a turn.

call: {"tool": "shell", "command": "ls src", "directory": "/home/user/project", "timeout_s": 10}
result: {"status": "ok", "output": "app.py config.py server.py"}
call: {"tool": "shell", "command": "cat src/app.py", "directory": "/home/user/project", "timeout_s": 10}
result: {"status": "ok", "output": "from config import load\\nfrom server import serve\\nserve(load())"}
call: {"tool": "shell", "command": "cat src/config.py", "directory": "/home/user/project", "timeout_s": 10}
result: {"status": "error", "output": "cat: src/config.py: Permission denied"}
"""
PROMPTS = {
    "code edits": (
        f"Rename the function load_users to read_users. Answer with the whole file.\n\n{CODE}",
        f"Add type hints to both functions. Answer with the whole file.\n\n{CODE}",
        f"Add a docstring to save_users. Answer with the whole file.\n\n{CODE}",
        f"Rename the variable result to active_users. Answer with the whole file.\n\n{CODE}",
    ),
    "JSON extraction": (
        f"Extract a JSON list of objects with name, born, city and profession.\n\n{RECORDS}",
        f"Write each person as a JSON object with the keys name and born.\n\n{RECORDS}",
        f"Return a JSON object that maps each name to the city of birth.\n\n{RECORDS}",
        f"Return JSON with one key people, a list of names and professions.\n\n{RECORDS}",
    ),
    "chat": (
        "Why is the sky blue?",
        "Give me a recipe for pancakes.",
        "Write a short story about a lighthouse.",
        "What should I see in Rome in two days?",
    ),
    "agent traces": (
        f"{TRACE}\nShow src/server.py.",
        f"{TRACE}\nMake src/config.py readable, then show it.",
        f"{TRACE}\nWrite the next three calls.",
        f"{TRACE}\nSummarize the calls so far and their results.",
    ),
}


class WrongDrafts(Drafter):
    """Drafts that are practically never right."""

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        return [(token_ids[-1] + 1 + i) % 1000 for i in range(max_tokens)]


@dataclass
class Run:
    """Attributes: outputs: by request; num_steps: of decoding; step_s: CPU seconds of decoding."""

    outputs: dict[str, list[int]]
    num_steps: int = 0
    step_s: float = 0.0
    drafted: Sequence[Drafted] = ()

    @property
    def num_decoded(self) -> int:
        return sum(len(ids) - 1 for ids in self.outputs.values())

    def take(self, message: WorkerMessage) -> None:
        if isinstance(message, FirstToken):
            self.outputs[message.request_id].append(message.token_id)
        elif isinstance(message, Tokens):
            for event in message.events:
                output = self.outputs[event.request_id]
                output += event.token_ids[len(output) - event.index :]


def run(engine: Engine, prompts: Sequence[list[int]], sampling: SamplingParams, speculation: str) -> Run:
    done = Run({f"r{number}": [] for number in range(len(prompts))})
    num_ended = 0

    def take(message: WorkerMessage) -> None:
        nonlocal num_ended
        done.take(message)
        num_ended += isinstance(message, Finished) or (isinstance(message, FirstToken) and bool(message.finish_reason))

    worker = LocalWorker(engine, PrefillConfig(), DecodeConfig(speculation=speculation), take)
    for name, prompt in zip(done.outputs, prompts, strict=True):
        worker.submit(name, prompt, sampling)
    worker.run_until(lambda: all(done.outputs.values()), TIMEOUT_S)
    began = time.process_time()
    deadline = time.monotonic() + TIMEOUT_S
    while num_ended < len(prompts):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {TIMEOUT_S:g} s")
        done.num_steps += worker.step()
    done.step_s = time.process_time() - began
    done.drafted = worker.scheduler.stats().drafted
    return done


@dataclass(frozen=True)
class Row:
    """
    Attributes:
        speculation: value of --speculation.
        accepted: share of drafted tokens.
        drafted_per_step: of a request, over all its steps.
        tokens_per_step: of a request, with speculation.
        rate, plain_rate: tokens per CPU second with and without speculation, of all requests.
        num_different: requests whose output differs from that without speculation.
    """

    kind: str
    batch: int
    temperature: float
    speculation: str
    drafted_per_step: float
    accepted: float
    tokens_per_step: float
    plain_rate: float
    rate: float
    num_different: int
    num_requests: int

    @property
    def speedup(self) -> float:
        return self.rate / self.plain_rate


def end_of_chats(tokenizer: Tokenizer) -> int:
    end: int | None = tokenizer.token_to_id("<|im_end|>")
    if end is None:
        raise ValueError("the model's chats do not end with <|im_end|>: use --model smollm2-135m-instruct")
    return end


def chats_of(kind: str, tokenizer: Tokenizer) -> list[list[int]]:
    chats = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in PROMPTS[kind]]
    return [tokenizer.encode(chat).ids for chat in chats]


def measure(
    engine: Engine,
    tokenizer: Tokenizer,
    kinds: Sequence[str],
    batches: Sequence[int],
    max_tokens: int,
) -> Iterator[Row]:
    end = end_of_chats(tokenizer)
    for kind in kinds:
        prompts = chats_of(kind, tokenizer)
        for batch in batches:
            for temperature in TEMPERATURES:
                sampling = SamplingParams(max_tokens, temperature=temperature, seed=1, stop_token_ids=(end,))
                parts = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
                plain = [run(engine, part, sampling, NO_SPECULATION) for part in parts]
                for speculation in SPECULATIONS:
                    done = [run(engine, part, sampling, speculation) for part in parts]
                    yield _row(kind, batch, temperature, speculation, plain, done)


def _row(
    kind: str, batch: int, temperature: float, speculation: str, plain: Sequence[Run], with_drafts: Sequence[Run]
) -> Row:
    num_tokens = sum(done.num_decoded for done in with_drafts)
    drafted = sum(one.num_tokens for done in with_drafts for one in done.drafted)
    accepted = sum(one.num_accepted for done in with_drafts for one in done.drafted)
    # Each accepted draft saves its request a step.
    num_steps = num_tokens - accepted
    return Row(
        kind,
        batch,
        temperature,
        speculation,
        drafted / max(1, num_steps),
        accepted / max(1, drafted),
        num_tokens / max(1, num_steps),
        sum(done.num_decoded for done in plain) / sum(done.step_s for done in plain),
        num_tokens / sum(done.step_s for done in with_drafts),
        sum(
            output != alone.outputs[name]
            for alone, done in zip(plain, with_drafts, strict=True)
            for name, output in done.outputs.items()
        ),
        sum(len(done.outputs) for done in plain),
    )


def print_sources(engine: Engine, tokenizer: Tokenizer, kinds: Sequence[str], max_tokens: int) -> None:
    columns = ("requests", "temperature", "source", "own drafts accepted", "shared", "tokens a step", "CPU us a step")
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|", flush=True)
    end = end_of_chats(tokenizer)
    for kind in kinds:
        prompts = chats_of(kind, tokenizer)
        for temperature in TEMPERATURES:
            sampling = SamplingParams(max_tokens, temperature=temperature, seed=1, stop_token_ids=(end,))
            outputs = run(engine, prompts, sampling, NO_SPECULATION).outputs.values()
            for name, replay in replays([*zip(prompts, outputs, strict=True)]):
                print(f"| {kind} | {temperature:g} | {name} | {replay.row()} |", flush=True)


def step_costs(engine: Engine, batches: Sequence[int], num_drafts: Sequence[int], num_steps: int) -> dict[str, float]:
    """Returns a step's CPU time with wrong drafts as times that of a step without, by batch and drafts."""
    costs = {}
    for batch in batches:
        prompts = [[(7 * i + 13 * number) % 1000 for i in range(200)] for number in range(batch)]
        plain = []
        timed: dict[int, list[float]] = {k: [] for k in num_drafts}
        for _ in range(3):
            done = run(engine, prompts, SamplingParams(num_steps), NO_SPECULATION)
            plain.append(done.step_s / done.num_steps)
            for k in num_drafts:
                drafting.MAX_DRAFTS = k
                # Enough tokens that no draft is cut short.
                done = run(engine, prompts, SamplingParams(num_steps), f"{__name__}:WrongDrafts")
                timed[k].append(done.step_s / done.num_steps)
        for k, times in timed.items():
            costs[f"{batch} requests, {k} drafts"] = statistics.median(times) / statistics.median(plain)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--kinds", nargs="+", default=[*PROMPTS], choices=PROMPTS, help="of requests")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4], help="requests that run together")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, default=24, help="steps of each measurement of a step's cost; 0: none")
    parser.add_argument("--sources", action="store_true", help="compare sources of drafts, and nothing else")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    model_dir = resolve_model(args.model)
    engine = build_engine(EngineConfig(str(model_dir), num_pages=512, num_threads=1), "speculation", lambda doing: None)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    if args.sources:
        print_sources(engine, tokenizer, args.kinds, args.max_tokens)
        engine.close()
        return
    columns = (
        *("requests", "batch", "temperature", "--speculation"),
        *("drafted a step", "accepted", "tokens a step", "tokens/CPU s", "ratio", "outputs that differ"),
    )
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|", flush=True)
    rows = []
    for row in measure(engine, tokenizer, args.kinds, args.batch, args.max_tokens):
        rows.append(row)
        print(
            f"| {row.kind} | {row.batch} | {row.temperature:g} | {row.speculation} | {row.drafted_per_step:.2f} "
            f"| {row.accepted:.0%} | {row.tokens_per_step:.2f} | {row.plain_rate:.1f} to {row.rate:.1f} "
            f"| {row.speedup:.2f} | {row.num_different} of {row.num_requests} |",
            flush=True,
        )
    costs = step_costs(engine, args.batch, (1, 2, 4, 7), args.steps) if args.steps else {}
    for name, cost in costs.items():
        print(f"step with {name}: {cost:.2f} x a plain step")
    if args.out is not None:
        args.out.write_text(json.dumps({"rows": [asdict(row) for row in rows], "step_costs": costs}, indent=1))
    engine.close()


if __name__ == "__main__":
    main()
