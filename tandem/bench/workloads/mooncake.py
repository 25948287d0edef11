"""Mooncake's traces: JSON lines with timestamp (ms), input_length, output_length and hash_ids.

Each hash id stands for a block of 512 tokens; equal ids have equal tokens.
"""

import json
import math
from pathlib import Path
from typing import Any

from tandem.bench.workloads.base import PromptPart, Session, Turn, Workload, timed, trace_length
from tandem.bench.workloads.prompts import PromptMaker

BLOCK_TOKENS = 512


class Mooncake(Workload):
    def __init__(self, make: PromptMaker, file: Path, time_scale: float = 1.0, limit: int | None = None) -> None:
        """Args: limit: number of first requests."""
        self._make = make
        self._file = file
        self._time_scale = time_scale
        self._limit = limit
        self._blocks: dict[int, PromptPart] = {}

    def sessions(self) -> list[Session]:
        turns: list[tuple[float, Turn]] = []
        try:
            with self._file.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if len(turns) == self._limit:
                        break
                    if not line.strip():
                        continue
                    try:
                        turns.append(self._entry(json.loads(line), number))
                    except (ValueError, LookupError, TypeError, OverflowError) as error:
                        raise ValueError(
                            f"{self._file}, line {number} is not of a Mooncake trace: {error!r}"
                        ) from error
        except OSError as error:
            raise ValueError(f"the trace {self._file} cannot be read: {error.strerror}") from error
        if not turns:
            raise ValueError(f"the trace {self._file} has no requests")
        return timed(turns, self._time_scale)

    def _entry(self, entry: dict[str, Any], number: int) -> tuple[float, Turn]:
        at_s = float(entry["timestamp"]) / 1e3
        if not math.isfinite(at_s):
            raise ValueError(f"{at_s} is no time")
        left, num_output = trace_length(entry["input_length"]), trace_length(entry["output_length"])
        hash_ids = entry.get("hash_ids") or []
        if not isinstance(hash_ids, list):
            raise TypeError("hash_ids is no list")
        parts = []
        for hash_id in map(int, hash_ids):
            if left <= 0:
                break
            block = self._block(hash_id)
            parts.append(block if left >= BLOCK_TOKENS else _beginning(block, left))
            left -= BLOCK_TOKENS
        if left > 0:
            # Tokens beyond the blocks are unique to this request.
            parts.append(self._make.part("user", left, f"own/{number}"))
        return at_s, Turn(tuple(parts), num_output)

    def _block(self, hash_id: int) -> PromptPart:
        if hash_id not in self._blocks:
            self._blocks[hash_id] = self._make.part("user", BLOCK_TOKENS, f"block/{hash_id}")
        return self._blocks[hash_id]


def _beginning(block: PromptPart, num_tokens: int) -> PromptPart:
    if block.token_ids is not None:
        return PromptPart(block.role, num_tokens, block.token_ids[:num_tokens])
    return PromptPart(block.role, num_tokens, text=" ".join(block.text.split()[:num_tokens]))
