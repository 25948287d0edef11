"""Measures drafts by a model on one GPU, with random weights.

  python -m benchmarks.model_drafts_gpu eagle draft --model DIRECTORY --draft DIRECTORY

For each source, an engine has the model of DIRECTORY and its drafter: an EAGLE-3 head of the model's sizes with 32,000
tokens, the draft model of --draft, or the model's own layer (mtp). The table has the time of 1, 2 and 4 drafts of each
sequence, from the call until the host knows them, the same beyond reading the drafter's weights, and a step without
drafts and one that checks them. All times are seconds of the host.

With --rates, a second table has tokens per second of a stream without drafts and with them, as many as Tandem chooses.
Drafts cost what they cost, but are right with a chance that is given: the model's next token is the last one plus 1.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_loop import PAGE_SIZE, build_dummy_engine, open_model
from benchmarks.speculation_gpu import MAX_RUN_TOKENS, MAX_TOKENS, PROMPT_LEN, Guesses, Run, count_up
from tandem.decode_worker.config import NO_SPECULATION
from tandem.engine.batch import Batch
from tandem.engine.draft_models.config import DRAFT, EAGLE, MODEL_SOURCES, DrafterConfig, read_drafter
from tandem.engine.engine import Engine
from tandem.engine.models.config import ModelConfig
from tandem.engine.token_sequence import TokenSequence
from tandem.sampling_params import SamplingParams

BATCH_SIZES = (1, 8, 32)
DRAFTS = (1, 2, 4)
CONTEXT = 1024
EAGLE_VOCAB_SIZE = 32_000
NUM_WARMUPS, NUM_TRIALS = 5, 31
# For the speed of the memory.
READ_BYTES = 2**30
SAMPLINGS = {
    "greedy": SamplingParams(4096),
    "sampled": SamplingParams(4096, temperature=1.0, seed=1),
    "filtered": SamplingParams(4096, temperature=1.0, top_k=50, top_p=0.95, seed=1),
}


def median_s(act: Callable[[], object]) -> float:
    times_s = []
    for _ in range(NUM_WARMUPS + NUM_TRIALS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        act()
        times_s.append(time.perf_counter() - began)
    return statistics.median(times_s[NUM_WARMUPS:])


def read_s(num_bytes: int) -> float:
    """Returns the seconds in which the device reads so many bytes, by the time of a large copy."""
    memory = torch.empty(2, READ_BYTES, dtype=torch.uint8, device="cuda")

    def copy() -> None:
        memory[0].copy_(memory[1])
        torch.cuda.synchronize()

    return num_bytes * median_s(copy) / (2 * READ_BYTES)


def saved(directory: Path, raw: dict[str, Any]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def drafter_of(source: str, model_dir: Path, draft_dir: Path | None, scratch: Path) -> str:
    """Returns the engine's drafter. Args: scratch: for an EAGLE-3 head's configuration."""
    if source == DRAFT:
        return f"{source}:{draft_dir}"
    if source != EAGLE:
        return source
    raw = json.loads((model_dir / "config.json").read_text())
    raw |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": min(EAGLE_VOCAB_SIZE, raw["vocab_size"]),
    }
    return f"{source}:{saved(scratch / source, raw)}"


def pass_bytes(drafter: DrafterConfig, target: ModelConfig) -> int:
    """Returns the bytes of the weights that a pass reads, without experts' shares: of mtp, an upper bound."""
    head = 2 * target.vocab_size * target.hidden_size
    if drafter.source == EAGLE:
        # The states of further drafts are no product.
        return drafter.weight_bytes - 2 * 3 * target.hidden_size**2
    if drafter.source == DRAFT:
        embedding = 2 * drafter.model.vocab_size * drafter.model.hidden_size
        return drafter.weight_bytes - (0 if drafter.model.tie_word_embeddings else embedding)
    return drafter.weight_bytes + head


def sequences_of(engine: Engine, batch_size: int, sampling: SamplingParams) -> list[TokenSequence]:
    """Returns sequences whose contexts are random numbers of scattered pages."""
    rng, vocabulary = random.Random(batch_size), range(engine.model.config.vocab_size)
    num_pages = -(-(CONTEXT + 1 + max(DRAFTS)) // PAGE_SIZE)
    pages = rng.sample(range(engine.pool.num_pages), batch_size * num_pages)
    return [
        TokenSequence(
            rng.choices(vocabulary, k=CONTEXT + 1),
            CONTEXT + 1,
            array("i", pages[number * num_pages : (number + 1) * num_pages]),
            CONTEXT,
            sampling,
        )
        for number in range(batch_size)
    ]


def step(engine: Engine, sequences: Sequence[TokenSequence], num_drafts: int) -> None:
    for number, sequence in enumerate(sequences):
        sequence.draft_ids = range(number, number + num_drafts)
        sequence.extend(1 + num_drafts)
    engine.forward(Batch.of(sequences, ())).token_ids()
    for sequence in sequences:
        sequence.device_len, sequence.draft_ids = sequence.cached_len, ()


def rows(engine: Engine, least_s: float) -> Iterator[dict[str, Any]]:
    """Args: least_s: seconds to read the weights of a pass."""
    maker, costs = engine.draft_maker, engine.draft_costs
    assert maker is not None and costs is not None

    def make(sequences: Sequence[TokenSequence], num_drafts: int) -> None:
        maker.make(sequences, [num_drafts] * len(sequences))

    for batch_size in BATCH_SIZES:
        for name, sampling in SAMPLINGS.items():
            sequences = sequences_of(engine, batch_size, sampling)
            plain_s = median_s(lambda: step(engine, sequences, 0))  # noqa: B023
            row = {"batch": batch_size, "tokens": name, "step": f"{plain_s * 1e3:.2f} ms"}
            for num_drafts in DRAFTS:
                made_s = median_s(lambda: make(sequences, num_drafts))  # noqa: B023
                beyond_s = made_s - num_drafts * least_s
                row[f"{num_drafts} drafts, beyond weights"] = f"{made_s * 1e3:.2f}, {beyond_s * 1e3:.2f} ms"
            checked_s = median_s(lambda: step(engine, sequences, DRAFTS[-1]))  # noqa: B023
            row[f"check {DRAFTS[-1]}"] = f"{checked_s * 1e3:.2f} ms"
            row["device's pass"] = f"{costs.pass_s(batch_size) * 1e3:.3f} ms"
            yield row


def rates(engine: Engine, source: str, chances: Sequence[float]) -> Iterator[dict[str, Any]]:
    maker = engine.draft_maker
    assert maker is not None
    make, guesses = maker.make, Guesses()
    Guesses.vocab_size = engine.model.config.vocab_size

    def guessed(sequences: Sequence[TokenSequence], num_drafts: Sequence[int]) -> list[list[int]]:
        make(sequences, num_drafts)
        return [guesses.propose(s.token_ids, num) for s, num in zip(sequences, num_drafts, strict=True)]

    maker.make = guessed  # type: ignore[method-assign]
    count_up(engine)
    for batch_size in BATCH_SIZES:
        off = Run(engine, batch_size, NO_SPECULATION)
        for chance in chances:
            Guesses.chance = chance
            drafting = Run(engine, batch_size, f"{source}:m" if source != "mtp" else source)
            # Clocks change with the load, so neighbors are compared.
            again = Run(engine, batch_size, NO_SPECULATION)
            rate = statistics.mean((off.rate, again.rate))
            off = again
            yield {
                "batch": batch_size,
                "acceptance": chance,
                "off": f"{rate:.1f} tok/s",
                source: f"{drafting.rate:.1f} tok/s ({drafting.rate / rate:.2f})",
                "drafts, accepted": f"{drafting.num_drafted}, {drafting.num_accepted}",
                "step": f"{drafting.step_s * 1e3:.2f} ms",
            }


def print_table(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for row in rows:
        if not found:
            print(f"| {' | '.join(row)} |\n{'|---' * len(row)}|")
        print(f"| {' | '.join(map(str, row.values()))} |", flush=True)
        found.append(row)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", choices=MODEL_SOURCES)
    parser.add_argument("--model", required=True, help="a directory with a model's config.json; its weights are random")
    parser.add_argument("--draft", type=Path, metavar="DIRECTORY", help="of a draft model, likewise")
    parser.add_argument("--layers", type=int, metavar="N", help="take fewer of the model's layers, for a faster start")
    parser.add_argument("--rates", type=float, nargs="+", default=[], metavar="CHANCE", help="acceptance of drafts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    arguments = parser.parse_args(argv)
    open_model(parser, Path(arguments.model))
    if DRAFT in arguments.sources and arguments.draft is None:
        parser.error("draft needs --draft")
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = Path(arguments.model)
        if arguments.layers:
            raw = json.loads((model_dir / "config.json").read_text())
            model_dir = saved(Path(scratch) / "model", {**raw, "num_hidden_layers": arguments.layers})
        for source in arguments.sources:
            drafter = drafter_of(source, model_dir, arguments.draft, Path(scratch))
            target = ModelConfig.from_dir(model_dir)
            config = read_drafter(drafter, target, model_dir)
            assert config is not None
            began = time.perf_counter()
            engine = build_dummy_engine(
                str(model_dir),
                lambda doing: None,
                num_pages=max(BATCH_SIZES) * (PROMPT_LEN + MAX_RUN_TOKENS) // PAGE_SIZE,
                cuda_graph_max_bs=max(BATCH_SIZES),
                max_chunk_tokens=max(BATCH_SIZES) * PROMPT_LEN,
                max_batch_size=max(BATCH_SIZES),
                max_drafts=max(DRAFTS),
                prefill_cuda_graphs=False,
                max_model_len=PROMPT_LEN + MAX_TOKENS,
                drafter=drafter,
            )
            assert isinstance(engine, Engine)
            print(f"{source}: engine built in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
            engine.pool.memory.view(torch.bfloat16).normal_()
            num_bytes = pass_bytes(config, target)
            least_s = read_s(num_bytes)
            print(f"\n{source}: a pass reads {num_bytes / 1e6:.0f} MB of weights, in {least_s * 1e3:.3f} ms")
            found[source] = print_table(rows(engine, least_s))
            if arguments.rates:
                found[f"{source} rates"] = print_table(rates(engine, source, arguments.rates))
            engine.close()
            del engine
            gc.collect()
            torch.cuda.empty_cache()
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
