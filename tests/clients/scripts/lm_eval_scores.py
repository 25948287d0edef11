"""A multiple-choice task; prints log likelihoods as JSON, for comparison with transformers."""

import json
import os
import tempfile
from pathlib import Path

from report import Report

os.environ["HF_HUB_OFFLINE"] = "1"
import lm_eval
from lm_eval.tasks import TaskManager

report = Report()
TASK = Path(__file__).with_name("lm_eval_task")


def scores(num_concurrent: int, tokenizer: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.environ["HF_DATASETS_CACHE"] = directory
        os.chdir(TASK)
        found = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": report.model,
                "base_url": f"{report.url}/v1/completions",
                "num_concurrent": num_concurrent,
                "max_retries": 1,
                "batch_size": 4,
                **({"tokenizer_backend": "remote"} if tokenizer == "remote" else {"tokenizer": report.model_dir}),
            },
            tasks=["capitals"],
            task_manager=TaskManager(include_path=str(TASK), include_defaults=False),
            log_samples=True,
            bootstrap_iters=0,
        )
        samples = sorted(found["samples"]["capitals"], key=lambda sample: sample["doc_id"])
        likelihoods = [[float(answer[0][0]) for answer in sample["resps"]] for sample in samples]
        print(f"scores  {json.dumps(likelihoods)}", flush=True)


report.check("multiple choice, with a tokenizer of its own", lambda: scores(2, "own"))
report.check("multiple choice, with the server's tokenizer", lambda: scores(1, "remote"))
report.end()
