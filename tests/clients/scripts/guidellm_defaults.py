"""GuideLLM run on chat completions."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from report import Report

report = Report()
NUM_REQUESTS = 6
RUN_TIMEOUT_S = 300


def run(request_format: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        command = [
            str(Path(sys.executable).with_name("guidellm")),
            "run",
            "--backend",
            f"kind=openai_http,target={report.url},request_format={request_format}",
            "--profile",
            "kind=concurrent,streams=2",
            "--constraint",
            f"kind=max_requests,count={NUM_REQUESTS}",
            "--tokenizer",
            f"kind=huggingface_auto,model={report.model_dir}",
            "--data",
            "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
            "--output",
            f"kind=json,path={directory}/run.json",
            "--disable-console",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-400:]
        found = json.loads(Path(directory, "run.json").read_text())
        totals = found["benchmarks"][0]["metrics"]["request_totals"]
        assert totals["successful"] == NUM_REQUESTS, totals


for request_format in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
    report.check(f"{NUM_REQUESTS} requests of {request_format}", lambda path=request_format: run(path))
report.end()
