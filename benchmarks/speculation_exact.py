"""Counts the tokens that speculation changes on one GPU by rounding, beside those that a change of batch size changes.

  python -m benchmarks.speculation_exact --model DIRECTORY

Given texts are computed three times: one sequence a step, K + 1 sequences a step, and one sequence with K right drafts
a step. At each position, greedy and sampled tokens are compared; the text goes on as given. Weights are random, and the
output matrix is scaled so that the next token is as uncertain as in a real text.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.engine_loop import PAGE_SIZE, build_dummy_engine, open_model
from tandem.engine.batch import Batch
from tandem.engine.engine import Engine
from tandem.engine.sampler import sample
from tandem.engine.token_sequence import TokenSequence
from tandem.sampling_params import SamplingParams

NUM_DRAFTS = 7
# Computed behind each prompt.
NUM_POSITIONS = 256
MAX_RATIO = 1.2
# Mean entropy of the next token, in nats.
ENTROPY = 2.5
# Rows sampled at once.
ROWS = 128
MODES = ("alone", "together", "drafted")
KINDS = ("greedy", "sampled")


class Texts:
    """Random texts whose prompts are in the pool."""

    def __init__(self, engine: Engine, first: int, prompt_len: int) -> None:
        """Args: first: number of the first text."""
        self._engine = engine
        self._prompt_len = prompt_len
        rng, vocabulary = random.Random(first), range(engine.model.config.vocab_size)
        length = prompt_len + NUM_POSITIONS
        num_pages = pages_of(prompt_len)
        self._texts = [rng.choices(vocabulary, k=length) for _ in range(1 + NUM_DRAFTS)]
        self._pages = [range(i * num_pages, (i + 1) * num_pages) for i in range(len(self._texts))]
        for number in range(len(self._texts)):
            prompt = self._sequence(number, prompt_len, 0)
            prompt.extend(prompt_len)
            engine.forward(Batch("prefill", [prompt])).token_ids()
        # As the sampler sees each position.
        self._rows = [
            TokenSequence(text[: end + 1], prompt_len, (), sampling=SamplingParams(1, temperature=1.0, seed=first + i))
            for i, text in enumerate(self._texts)
            for end in range(prompt_len, length)
        ]

    @property
    def num_tokens(self) -> int:
        return len(self._rows)

    @torch.inference_mode()
    def tokens(self, mode: str, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the tokens behind each position, by kind: (num_tokens,). Args: logits: memory of (num_tokens,
        vocab_size) bfloat16."""
        self.compute(mode, logits)
        sampled = [
            sample(logits[first : first + ROWS].float(), self._rows[first : first + ROWS]).token_ids
            for first in range(0, self.num_tokens, ROWS)
        ]
        return {"greedy": logits.argmax(dim=-1), "sampled": torch.cat(sampled)}

    @torch.inference_mode()
    def compute(self, mode: str, logits: torch.Tensor) -> None:
        by_text = logits.view(len(self._texts), NUM_POSITIONS, -1)
        for batch, numbers, start in self._batches(mode):
            if mode == "drafted":
                by_text[numbers[0], start : start + 1 + NUM_DRAFTS] = self._logits(batch)
            else:
                by_text[numbers[0] : numbers[-1] + 1, start] = self._logits(batch)

    def _logits(self, batch: Batch) -> torch.Tensor:
        """Sampling each step by itself would take most of the time."""
        engine = self._engine
        assert engine._draft_graphs is not None and engine._graphs is not None
        output = engine._draft_graphs.run(batch) if batch.num_drafts else engine._graphs.run(batch, None)
        assert output is not None
        return output.logits

    def _batches(self, mode: str) -> Iterator[tuple[Batch, Sequence[int], int]]:
        """Yields decode steps, their texts' numbers, and the first position of each after the prompt."""
        numbers, first = range(len(self._texts)), self._prompt_len
        for group in [[number] for number in numbers] if mode != "together" else [[*numbers]]:
            for start in range(0, NUM_POSITIONS, 1 + NUM_DRAFTS if mode == "drafted" else 1):
                sequences = [self._sequence(number, first + start + 1, first + start) for number in group]
                for number, sequence in zip(group, sequences, strict=True):
                    if mode == "drafted":
                        end = len(sequence.token_ids)
                        sequence.draft_ids = self._texts[number][end : end + NUM_DRAFTS]
                    sequence.extend(1 + len(sequence.draft_ids))
                yield Batch("decode", sequences), group, start

    def _sequence(self, number: int, num_tokens: int, cached_len: int) -> TokenSequence:
        return TokenSequence(self._texts[number][:num_tokens], self._prompt_len, self._pages[number], cached_len)


@dataclass
class Changes:
    """Numbers of tokens that differ from those of one sequence a step."""

    kind: str
    num_tokens: int = 0
    by_batch: int = 0
    by_drafts: int = 0

    @property
    def ratio(self) -> float:
        return self.by_drafts / max(1, self.by_batch)


def pages_of(prompt_len: int) -> int:
    return -(-(prompt_len + NUM_POSITIONS) // PAGE_SIZE)


@torch.inference_mode()
def sharpen(engine: Engine, logits: torch.Tensor) -> None:
    """Scales the output matrix so that these logits have the mean entropy ENTROPY."""
    low, high = 1.0, 1e4
    while high / low > 1.001:
        factor = (low * high) ** 0.5
        log_shares = torch.log_softmax(logits.float() * factor, dim=-1)
        entropy = -(log_shares.exp() * log_shares).sum(dim=-1).mean()
        low, high = (factor, high) if entropy > ENTROPY else (low, factor)
    dict(engine.model.named_parameters())["lm_head.weight"].mul_(low)


def count(engine: Engine, num_tokens: int, prompt_len: int) -> Iterator[list[Changes]]:
    """Yields the changes so far."""
    changes = [Changes(kind) for kind in KINDS]
    logits = torch.empty(
        (1 + NUM_DRAFTS) * NUM_POSITIONS, engine.model.config.vocab_size, dtype=torch.bfloat16, device="cuda"
    )
    Texts(engine, 0, prompt_len).compute("together", logits)
    sharpen(engine, logits[::NUM_DRAFTS][:ROWS])
    number = 0
    while changes[0].num_tokens < num_tokens:
        texts = Texts(engine, number, prompt_len)
        number += 1 + NUM_DRAFTS
        alone, together, drafted = (texts.tokens(mode, logits) for mode in MODES)
        for of_kind in changes:
            of_kind.num_tokens += texts.num_tokens
            of_kind.by_batch += int((alone[of_kind.kind] != together[of_kind.kind]).sum())
            of_kind.by_drafts += int((alone[of_kind.kind] != drafted[of_kind.kind]).sum())
        yield changes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory with a model's config.json; its weights are random")
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="of the model's layers; 0: all")
    parser.add_argument("--prompt", type=int, default=2048, metavar="N", help="tokens before the compared ones")
    parser.add_argument("--tokens", type=int, default=100_000, metavar="N", help="of all texts, at least")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    arguments = parser.parse_args(argv)
    open_model(parser, Path(arguments.model))
    with tempfile.TemporaryDirectory() as directory:
        config = json.loads((Path(arguments.model) / "config.json").read_text())
        config["num_hidden_layers"] = arguments.layers or config["num_hidden_layers"]
        # A random embedding that is also the output's makes each token its own successor, by far.
        config["tie_word_embeddings"] = False
        (Path(directory) / "config.json").write_text(json.dumps(config))
        engine = build_dummy_engine(
            directory,
            lambda doing: None,
            num_pages=(1 + NUM_DRAFTS) * pages_of(arguments.prompt),
            cuda_graph_max_bs=1 + NUM_DRAFTS,
            max_batch_size=1 + NUM_DRAFTS,
            max_drafts=NUM_DRAFTS,
            max_chunk_tokens=arguments.prompt,
            max_model_len=arguments.prompt + NUM_POSITIONS,
            prefill_cuda_graphs=False,
        )
    assert isinstance(engine, Engine)
    began = time.perf_counter()
    for changes in count(engine, arguments.tokens, arguments.prompt):
        so_far = ", ".join(f"{of_kind.kind} {of_kind.by_batch} and {of_kind.by_drafts}" for of_kind in changes)
        print(f"{time.perf_counter() - began:.1f} s, {changes[0].num_tokens:,} tokens: {so_far}", file=sys.stderr)
    print(f"| tokens | of | changed by a batch of {1 + NUM_DRAFTS} | changed by {NUM_DRAFTS} drafts | ratio |")
    print("|---|---|---|---|---|")
    for of_kind in changes:
        numbers = f"{of_kind.num_tokens:,} | {of_kind.by_batch:,} | {of_kind.by_drafts:,}"
        print(f"| {of_kind.kind} | {numbers} | {of_kind.ratio:.3f} |")
    if arguments.json:
        arguments.json.write_text(json.dumps([vars(of_kind) for of_kind in changes], indent=1) + "\n")
    return 0 if all(of_kind.ratio <= MAX_RATIO for of_kind in changes) else 1


if __name__ == "__main__":
    sys.exit(main())
