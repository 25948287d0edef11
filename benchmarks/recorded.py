"""A cluster is recorded while it is measured, into a compressed file for Perfetto."""

import gzip
import json
import threading
from pathlib import Path
from typing import Any

from tandem.client import TandemClient, TandemError
from tandem.deploy.cli.trace_events import Trace
from tandem.v1 import recording_pb2 as pb

# Files are to be small enough to be kept beside the results.
MAX_FILE_BYTES = 8_000_000
# Parts come once a recording has ended.
COLLECT_TIMEOUT_S = 30.0


class Recording:
    """Waits, then has a cluster record itself, as `tandem trace` does, beside the thread that made this."""

    def __init__(self, address: str, delay_s: float, seconds: float) -> None:
        self._seconds = seconds
        self._delay_s = delay_s
        self._address = address
        self._given_up = threading.Event()
        self._parts: list[pb.RecordedPart] = []
        self._failure = ""
        self._thread = threading.Thread(target=self._record, name="recording", daemon=True)
        self._thread.start()

    def _record(self) -> None:
        if self._given_up.wait(self._delay_s):
            self._failure = "what was to be recorded had ended before"
            return
        try:
            with TandemClient(self._address) as client:
                self._parts.extend(client.record(self._seconds))
        except TandemError as error:
            self._failure = str(error)

    def finish(self, file: Path, max_bytes: int = MAX_FILE_BYTES) -> list[str]:
        """Waits for the recording's end and writes what there is; returns what is missing, in words. Raises OSError."""
        self._given_up.set()
        self._thread.join(self._seconds + COLLECT_TIMEOUT_S)
        if self._thread.is_alive():
            return ["the recording has not come"]
        if self._failure:
            return [self._failure]
        trace = Trace()
        for part in self._parts:
            trace.add(part)
        self._parts.clear()
        return trace.warnings + write_within(trace.as_json(), file, max_bytes)


def write_within(trace: dict[str, Any], file: Path, max_bytes: int) -> list[str]:
    """Writes a trace, compressed; of one that is too large, what came last. Returns what is missing, in words, which is
    in the file too."""
    warnings: list[str] = []
    told = trace["otherData"]
    while True:
        # The best level takes three times as long, and saves a twentieth.
        packed = gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), compresslevel=6)
        if len(packed) <= max_bytes:
            file.write_bytes(packed)
            return warnings
        trace, cut_us = from_later(trace, 0.9 * max_bytes / len(packed))
        warnings = [f"{file.name} begins {cut_us / 1e6:.2f} s after the recording, all of which would be too large"]
        trace["otherData"] = {**told, "cut_us": cut_us, "warnings": [*told.get("warnings", ()), *warnings]}


def from_later(trace: dict[str, Any], share: float) -> tuple[dict[str, Any], float]:
    """A trace with the last of its events alone, and the moment where these begin. Args: share: of the events."""
    events = trace["traceEvents"]
    moments = sorted(event["ts"] for event in events if event["ph"] != "M")
    cut_us = moments[min(int(len(moments) * (1 - share)) + 1, len(moments) - 1)]
    kept = [event for event in events if event["ph"] == "M" or event["ts"] >= cut_us]
    return {**trace, "traceEvents": kept}, cut_us
