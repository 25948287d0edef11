"""Loads of the goodput benchmark: single prompts, or conversations whose KV is a multiple of the pool."""

import argparse
import re
import zlib
from dataclasses import dataclass, replace

from tandem.bench.arrivals import ArrivalConfig
from tandem.bench.clients.base import EndpointConfig
from tandem.bench.config import BenchConfig, WorkloadConfig
from tandem.bench.workloads.synthetic import Lengths

_CELL = re.compile(r"(?:(\d+)\+)?(\d+)x(\d+)(?:x(\d+))?@(\d+(?:\.\d+)?)(?:/(\d+(?:\.\d+)?))?")
WARMUP_PROMPTS = 8
GRACE_S = 90.0
# The longest that a conversation may take to fill the caches, on average.
FILL_S = 2.0


@dataclass(frozen=True, slots=True)
class Cell:
    """
    Attributes:
        input_tokens, output_tokens: of each turn.
        rate: requests per second.
        document_tokens: before the first question of each conversation.
        num_turns: 1: single prompts.
        working_set: tokens of all conversations at their ends, as a multiple of the pools; 0 for single prompts.
    """

    input_tokens: int
    output_tokens: int
    rate: float
    document_tokens: int = 0
    num_turns: int = 1
    working_set: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Cell":
        """Parse "4096x256@10" or "8192+256x128x4@6/3". Raises ValueError."""
        found = _CELL.fullmatch(text)
        if found is not None:
            document, turns, working_set = int(found[1] or 0), int(found[4] or 1), float(found[6] or 0)
            cell = cls(int(found[2]), int(found[3]), float(found[5]), document, turns, working_set)
            if cell.rate and turns and cell.is_conversation == bool(working_set):
                return cell
        raise ValueError(
            "a cell is PROMPTxOUTPUT@RATE, such as 4096x256@10, or DOCUMENT+PROMPTxOUTPUTxTURNS@RATE/SET, such as "
            f"8192+256x128x4@6/3, not {text!r}"
        )

    def __str__(self) -> str:
        document = f"{self.document_tokens}+" if self.document_tokens else ""
        turns = f"x{self.num_turns}" if self.is_conversation else ""
        working_set = f"/{self.working_set:g}" if self.is_conversation else ""
        return f"{document}{self.input_tokens}x{self.output_tokens}{turns}@{self.rate:g}{working_set}"

    @property
    def is_conversation(self) -> bool:
        return self.num_turns > 1

    def num_conversations(self, pool_tokens: int) -> int:
        tokens = self.document_tokens + self.num_turns * (self.input_tokens + self.output_tokens)
        return max(1, round(self.working_set * pool_tokens / tokens))

    def seconds(self, pool_tokens: int, arriving_s: float) -> float:
        """Return a bound of the duration, without warm-up. Args: arriving_s: of single prompts."""
        if not self.is_conversation:
            return arriving_s
        return self.num_conversations(pool_tokens) * (self.num_turns / self.rate + FILL_S)


def bench_config(
    address: str, cell: Cell, arguments: argparse.Namespace, is_warmup: bool, pool_tokens: int = 0
) -> BenchConfig:
    """Args: pool_tokens: of all pools that prompts are computed in, for conversations."""
    num_conversations = cell.num_conversations(pool_tokens)
    is_multi_turn = cell.is_conversation and not is_warmup
    # One turn of every conversation takes this long, so that all others come between two turns of one.
    round_s = num_conversations / cell.rate if is_multi_turn else 0.0
    num_single = WARMUP_PROMPTS if is_warmup else None
    return BenchConfig(
        EndpointConfig(f"grpc://{address}", timeout_s=cell.seconds(pool_tokens, arguments.seconds) + GRACE_S),
        WorkloadConfig(
            "multi-turn" if is_multi_turn else "synthetic",
            num_requests=num_conversations if is_multi_turn else num_single,
            input_lengths=Lengths(cell.input_tokens, cell.input_tokens),
            output_lengths=Lengths(cell.output_tokens, cell.output_tokens),
            num_document_tokens=cell.document_tokens,
            num_turns=cell.num_turns,
            think_s=round_s,
            vocab_size=arguments.vocab_size,
            # No prompt may be cached from another cell or the warm-up; layouts get equal prompts.
            seed=zlib.crc32(f"{cell} {is_warmup}".encode()),
        ),
        ArrivalConfig("closed", concurrency=WARMUP_PROMPTS) if is_warmup else ArrivalConfig("poisson", cell.rate),
        duration_s=None if is_warmup or is_multi_turn else arguments.seconds,
        num_processes=1 if is_warmup else arguments.processes,
        label=str(cell),
    )


def fill_config(measured: BenchConfig) -> BenchConfig:
    """Compute the first prompts of all conversations once, as fast as they go, before turns are measured."""
    workload = replace(measured.workload, output_lengths=Lengths(1, 1), num_turns=1, think_s=0.0)
    arrivals = ArrivalConfig("closed", concurrency=WARMUP_PROMPTS)
    return replace(measured, workload=workload, arrivals=arrivals, num_processes=1)
