"""Azure's LLM inference traces: CSV with TIMESTAMP, ContextTokens and GeneratedTokens. Prompts share nothing."""

import csv
import re
from datetime import UTC, datetime
from pathlib import Path

from tandem.bench.workloads.base import Session, Turn, Workload, timed, trace_length
from tandem.bench.workloads.prompts import PromptMaker

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
# Timestamps have seven fractional digits; Python parses six.
_FRACTION = re.compile(r"(\.\d{6})\d+")


class Azure(Workload):
    def __init__(self, make: PromptMaker, file: Path, time_scale: float = 1.0, limit: int | None = None) -> None:
        """Args: limit: number of first requests."""
        self._make = make
        self._file = file
        self._time_scale = time_scale
        self._limit = limit

    def sessions(self) -> list[Session]:
        turns: list[tuple[float, Turn]] = []
        try:
            with self._file.open(newline="", encoding="utf-8-sig") as lines:
                rows = csv.DictReader(lines)
                if missing := [name for name in COLUMNS if name not in (rows.fieldnames or ())]:
                    raise ValueError(f"{self._file} is not an Azure trace: it has no column {', '.join(missing)}")
                for row in rows:
                    if len(turns) == self._limit:
                        break
                    try:
                        at_s = _seconds(row["TIMESTAMP"])
                        num_input, num_output = (trace_length(row[name]) for name in COLUMNS[1:])
                    except (ValueError, TypeError) as error:
                        where = f"{self._file}, line {rows.line_num}"
                        raise ValueError(f"{where} is not of an Azure trace: {error}") from error
                    prompt = self._make.part("user", num_input, f"{len(turns)}")
                    turns.append((at_s, Turn((prompt,), num_output)))
        except OSError as error:
            raise ValueError(f"the trace {self._file} cannot be read: {error.strerror}") from error
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{self._file} is not an Azure trace: {error}") from error
        if not turns:
            raise ValueError(f"the trace {self._file} has no requests")
        return timed(turns, self._time_scale)


def _seconds(text: str) -> float:
    moment = datetime.fromisoformat(_FRACTION.sub(r"\1", text.strip()))
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
