"""Traces as Mooncake publishes them: JSON lines with timestamp (ms), input_length, output_length and hash_ids, one for
each block of 512 tokens; where two requests name the same block, their prompts have the same tokens there."""

import json
from pathlib import Path
from typing import Any

from bench.workloads.base import PromptPart, Session, Turn, Workload
from bench.workloads.prompts import PromptMaker

BLOCK_TOKENS = 512


class Mooncake(Workload):
    def __init__(self, make: PromptMaker, file: Path, time_scale: float = 1.0, limit: int | None = None) -> None:
        """Args: time_scale: what its times are multiplied with; limit: only the first so many requests."""
        self._make = make
        self._file = file
        self._time_scale = time_scale
        self._limit = limit
        self._blocks: dict[int, PromptPart] = {}

    def sessions(self) -> list[Session]:
        sessions: list[Session] = []
        first_ms = 0.0
        try:
            with self._file.open() as lines:
                for number, line in enumerate(lines, 1):
                    if len(sessions) == self._limit:
                        break
                    if not line.strip():
                        continue
                    try:
                        entry = json.loads(line)
                        at_ms, turn = float(entry["timestamp"]), self._turn(entry, number)
                    except (ValueError, LookupError, TypeError) as error:
                        raise ValueError(
                            f"{self._file}, line {number} is not of a Mooncake trace: {error!r}"
                        ) from error
                    first_ms = first_ms if sessions else at_ms
                    due_s = (at_ms - first_ms) / 1e3 * self._time_scale
                    sessions.append(Session(len(sessions), (turn,), due_s=due_s))
        except OSError as error:
            raise ValueError(f"the trace {self._file} cannot be read: {error.strerror}") from error
        if not sessions:
            raise ValueError(f"the trace {self._file} has no requests")
        return sessions

    def _turn(self, entry: dict[str, Any], number: int) -> Turn:
        num_input, num_output = int(entry["input_length"]), max(1, int(entry["output_length"]))
        hash_ids = [int(hash_id) for hash_id in entry.get("hash_ids") or ()]
        parts, left = [], max(1, num_input)
        for hash_id in hash_ids:
            if left <= 0:
                break
            block = self._block(hash_id)
            parts.append(block if left >= BLOCK_TOKENS else _beginning(block, left))
            left -= BLOCK_TOKENS
        if left > 0:
            # What no block covers is this request's own.
            parts.append(self._make.part("user", left, f"own/{number}"))
        return Turn(tuple(parts), num_output)

    def _block(self, hash_id: int) -> PromptPart:
        if hash_id not in self._blocks:
            self._blocks[hash_id] = self._make.part("user", BLOCK_TOKENS, f"block/{hash_id}")
        return self._blocks[hash_id]


def _beginning(block: PromptPart, num_tokens: int) -> PromptPart:
    if block.token_ids is not None:
        return PromptPart(block.role, num_tokens, block.token_ids[:num_tokens])
    return PromptPart(block.role, num_tokens, text=" ".join(block.text.split()[:num_tokens]))
