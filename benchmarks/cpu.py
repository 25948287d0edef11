"""Compares a cluster's output tokens per second on a CPU with transformers' generate.

Both compute the same greedy outputs in float32 with equally many threads, in turns; ratios are taken within a turn. A
cluster's time lasts from sending the requests over gRPC to the end of the last answer.
"""

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from tandem.client import TandemClient
from tandem.deploy.config.cluster_config import ClusterConfig
from tandem.deploy.launcher import Cluster
from tandem.deploy.serve import run_cluster
from tandem.v1 import inference_pb2 as pb

MODEL = "smollm2-135m-instruct"
TEXT = Path(__file__).parents[1] / "docs/architecture.md"
PROMPT_LEN = 64
# Distance between the starts of prompts in TEXT: none is a prefix of another.
STRIDE = 19
# Aims for the ratio of tokens per second, by number of concurrent requests.
AIMS = {1: 1.1, 8: 1.0}

Prompts = Sequence[Sequence[int]]
Outputs = list[list[int]]


class Round(NamedTuple):
    """One turn of each side. Attributes: num_equal: requests with equal outputs."""

    tandem_s: float
    generate_s: float
    num_equal: int
    transfer_ms: list[float]


class Tandem:
    def __init__(self, address: str, max_tokens: int) -> None:
        self._client = TandemClient(address)
        self._sampling = pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self._threads = ThreadPoolExecutor(max(AIMS))

    def __call__(self, prompts: Prompts) -> tuple[Outputs, list[float]]:
        answers = list(self._threads.map(self._answer, prompts))
        return [token_ids for token_ids, _ in answers], [transfer_ms for _, transfer_ms in answers]

    def _answer(self, prompt: Sequence[int]) -> tuple[list[int], float]:
        token_ids: list[int] = []
        transfer_ms = 0.0
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=self._sampling)
        for response in self._client.generate(request):
            token_ids += response.token_ids
            transfer_ms += sum(p.duration_ms for p in response.phases if p.name == "transfer")
        return token_ids, transfer_ms


class Generate:
    def __init__(self, model_dir: str, max_tokens: int, num_threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(num_threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32").eval()
        self._model.generation_config.eos_token_id = None
        self._max_tokens = max_tokens

    def __call__(self, prompts: Prompts) -> Outputs:
        import torch

        batch = torch.tensor(prompts)
        options = {"max_new_tokens": self._max_tokens, "do_sample": False, "pad_token_id": 0}
        outputs = self._model.generate(batch, attention_mask=torch.ones_like(batch), **options)
        return outputs[:, batch.shape[1] :].tolist()


def make_prompts(model_dir: Path, num_prompts: int) -> Outputs:
    """Cut prompts with different beginnings from TEXT, which wraps around."""
    from tandem.router.text.tokenizer import Tokenizer

    tokens = Tokenizer(model_dir).encode(TEXT.read_text())
    return [[tokens[(STRIDE * n + i) % len(tokens)] for i in range(PROMPT_LEN)] for n in range(num_prompts)]


def compare(tandem: Tandem, generate: Generate, prompts: Prompts, *, tandem_first: bool) -> Round:
    seconds: dict[str, float] = {}
    outputs: dict[str, Outputs] = {}
    transfer_ms: list[float] = []
    for side in ("tandem", "generate") if tandem_first else ("generate", "tandem"):
        start = time.perf_counter()
        if side == "tandem":
            outputs[side], transfer_ms = tandem(prompts)
        else:
            outputs[side] = generate(prompts)
        seconds[side] = time.perf_counter() - start
    num_equal = sum(a == b for a, b in zip(outputs["tandem"], outputs["generate"], strict=True))
    return Round(seconds["tandem"], seconds["generate"], num_equal, transfer_ms)


def summarize(batch_size: int, max_tokens: int, rounds: Sequence[Round]) -> dict[str, Any]:
    num_tokens = batch_size * max_tokens
    ratios = [r.generate_s / r.tandem_s for r in rounds]
    num_equal = sum(r.num_equal for r in rounds)
    return {
        "requests": batch_size,
        "tandem_tokens_per_s": num_tokens / statistics.median(r.tandem_s for r in rounds),
        "generate_tokens_per_s": num_tokens / statistics.median(r.generate_s for r in rounds),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "aim": AIMS[batch_size],
        "transfer_ms": statistics.median(t for r in rounds for t in r.transfer_ms),
        "equal": num_equal,
        "of": batch_size * len(rounds),
        "ok": statistics.median(ratios) >= AIMS[batch_size] and num_equal == batch_size * len(rounds),
    }


def run(cluster: Cluster, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from tandem.engine.weights.resolve import resolve_model

    model_dir = resolve_model(MODEL)
    tandem = Tandem(cluster.addresses.grpc, arguments.max_tokens)
    generate = Generate(str(model_dir), arguments.max_tokens, arguments.threads)
    prompts = iter(make_prompts(model_dir, sum(AIMS) * (arguments.rounds + 1)))
    results = []
    for batch_size in AIMS:
        rounds = []
        for number in range(arguments.rounds + 1):
            batch = [next(prompts) for _ in range(batch_size)]
            rounds.append(compare(tandem, generate, batch, tandem_first=bool(number % 2)))
            latest = rounds[-1]
            print(f"{batch_size} requests: {latest.tandem_s:.2f} s, generate {latest.generate_s:.2f} s", flush=True)
        results.append(summarize(batch_size, arguments.max_tokens, rounds[1:]))
    return results


def show(results: Sequence[dict[str, Any]]) -> None:
    table = Table(title=f"{MODEL}, float32: output tokens per second, median")
    for column in ("requests", "tandem", "generate", "ratio", "min to max", "aim", "transfer ms", "equal", "ok"):
        table.add_column(column, justify="right")
    for r in results:
        table.add_row(
            str(r["requests"]),
            f"{r['tandem_tokens_per_s']:.1f}",
            f"{r['generate_tokens_per_s']:.1f}",
            f"{r['ratio']:.2f}",
            f"{r['ratio_min']:.2f} to {r['ratio_max']:.2f}",
            f"{r['aim']:.2f}",
            f"{r['transfer_ms']:.1f}",
            f"{r['equal']} of {r['of']}",
            "yes" if r["ok"] else "no",
        )
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured turns of each side (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="output tokens of each request (%(default)s)")
    threads = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=threads, help="of generate and of each worker (%(default)s)")
    parser.add_argument("--separate", action="store_true", help="separate prefill and decode workers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    arguments = parser.parse_args(argv)

    def use(cluster: Cluster, stop: threading.Event) -> int:
        results = run(cluster, arguments)
        show(results)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=2) + "\n")
        return 0 if all(r["ok"] for r in results) else 1

    config = ClusterConfig(
        MODEL,
        num_prefill=int(arguments.separate),
        num_decode=int(arguments.separate),
        num_both=int(not arguments.separate),
        num_threads=arguments.threads,
        grpc_port=0,
        http_port=0,
    )
    return run_cluster(config, use)


if __name__ == "__main__":
    sys.exit(main())
