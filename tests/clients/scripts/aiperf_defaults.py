"""AIPerf runs: chat completions, whole and streamed, and completions."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from report import Report

report = Report()
NUM_REQUESTS = 10
RUN_TIMEOUT_S = 300


def run(endpoint_type: str, *more: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        command = [
            str(Path(sys.executable).with_name("aiperf")),
            "profile",
            "--model",
            report.model,
            "--url",
            report.url,
            "--endpoint-type",
            endpoint_type,
            "--tokenizer",
            report.model_dir,
            "--request-count",
            str(NUM_REQUESTS),
            "--isl",
            "32",
            "--osl",
            "8",
            "--ui",
            "none",
            "--output-artifact-dir",
            directory,
            *more,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-400:]
        found = json.loads(next(Path(directory).rglob("profile_export_aiperf.json")).read_text())
        assert found["request_count"]["avg"] == NUM_REQUESTS, found.get("error_summary")
        assert not found.get("error_summary"), found["error_summary"]


for what, given in {
    "chat": ("chat",),
    "chat, streamed": ("chat", "--streaming"),
    "completions, streamed": ("completions", "--streaming"),
    "responses, streamed": ("responses", "--streaming"),
    "messages, streamed": ("messages", "--streaming"),
}.items():
    report.check(f"{NUM_REQUESTS} requests: {what}", lambda given=given: run(*given))
report.end()
