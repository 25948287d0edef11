"""The flags of `tandem estimate`."""

import argparse
import re
from math import isfinite
from pathlib import Path

from tandem.bench.config import TRACES
from tandem.bench.goodput import parse_duration
from tandem.config import default_of
from tandem.deploy.config.cluster_options import GPU as GPU_DEFAULTS
from tandem.deploy.config.cluster_options import OFF, ON, ClusterOptions
from tandem.deploy.estimate.gpus import GPUS
from tandem.engine.adapters.base import MAX_LORA_RANK
from tandem.engine.config import KV_CACHE_DTYPES, MAX_LORAS, MAX_WORKERS_PER_GPU, QUANTIZATIONS, EngineConfig
from tandem.engine.ranks.config import MAX_DEGREE

EPILOG = """\
Starts nothing and needs no GPU; reads only the model's config.json. docs/estimate.md has the formulas, their sources
and their errors against measurements.

examples:
  tandem estimate --model org/name --gpu h200 --workload 4096/256
  tandem estimate --model org/name --gpu h200 --workload 4096/256 --slo ttft=500ms,itl=25ms --gpus 4
  tandem estimate --model org/name --gpu h100 --workload 2000/500 --slo ttft=1s --rate 20
  tandem estimate --model org/name --gpu h200 --workload azure --trace FILE.csv --slo ttft=1s,itl=25ms
  tandem estimate --model DIRECTORY --gpu-memory 96 --bandwidth 3900 --flops 950 --link 450 --workload 1000/1000
"""
_WORKLOAD = re.compile(r"([\d_,]+)/([\d_,]+)")
_LIMITS = ("ttft", "itl")
# A figure outside has a wrong unit and would overflow.
_SMALLEST_FIGURE, _LARGEST_FIGURE = 0.1, 1_000_000
# The search tries every size up to it.
_MAX_BATCH_SIZE = 4096
_MAX_SHOWN = 40
# More than a decode step checks.
_MAX_DRAFTS = 16


def add_estimate_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--model",
        required=True,
        metavar="NAME",
        help="directory with config.json, .gguf file, hub id such as org/name, or smollm2-135m-instruct",
    )
    add("--gpu", choices=tuple(GPUS), help="a known kind of GPU")
    add(
        "--workload",
        type=_workload,
        required=True,
        metavar=f"IN/OUT|{'|'.join(TRACES)}",
        help="tokens per prompt and per output, such as 4096/256, or the format of a trace",
    )
    add("--trace", type=Path, metavar="FILE", help="find the cheapest bounds of --workers for this trace")
    add("--time-scale", type=_positive, default=1.0, metavar="X", help="factor on a trace's times (default: 1)")
    add(
        "--start-time",
        type=_duration,
        default=60.0,
        metavar="TIME",
        help="for a trace: time from a worker's order to its first request (default: 1m)",
    )
    add(
        "--slo",
        type=_limits,
        default={},
        metavar="NAME=TIME,...",
        help="limits on TTFT and ITL, such as ttft=500ms,itl=25ms (default: none)",
    )
    add(
        "--good-share",
        type=_share,
        default=0.9,
        metavar="S",
        help="share of requests that must meet all limits (default: %(default)s)",
    )
    add(
        "--hit-rate",
        type=_part,
        default=0.0,
        metavar="S",
        help="share of each prompt that is cached in its worker's pool (default: %(default)g)",
    )
    add(
        "--store-hit-rate",
        type=_part,
        default=0.0,
        metavar="S",
        help="share of each prompt that is in the page store's memory, behind that (default: %(default)g)",
    )
    for flag, help in (
        ("--drafted", "with speculation: drafted tokens of a request in a step"),
        ("--accepted", "with speculation: accepted tokens of these"),
    ):
        add(flag, type=_drafts, default=0.0, metavar="K", help=f"{help} (default: %(default)g)")
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--gpus", type=_count, metavar="N", help="find the best roles of N GPUs and their rate")
    asked.add_argument("--rate", type=_positive, metavar="R", help="find the number of GPUs for R requests per second")
    add("--json", action="store_true", help="print JSON: seconds, bytes, tokens")
    figures = parser.add_argument_group("other GPUs", "figures of a data sheet, in place of those of --gpu")
    figures.add_argument("--gpu-memory", type=_figure, metavar="GB", help="memory")
    figures.add_argument("--bandwidth", type=_figure, metavar="GB/S", help="memory bandwidth")
    figures.add_argument("--flops", type=_figure, metavar="TFLOPS", help="bfloat16 throughput without sparsity")
    figures.add_argument("--link", type=_figure, metavar="GB/S", help="bandwidth to another GPU of the host, one way")
    figures.add_argument("--host-link", type=_figure, metavar="GB/S", help="bandwidth from the host's memory, one way")
    served = parser.add_argument_group("served with", "as for `tandem serve --device cuda`")
    served.add_argument(
        "--quantization",
        choices=QUANTIZATIONS,
        default=default_of(EngineConfig, "quantization"),
        help="fp8: FP8 weights for any checkpoint (default: as in the checkpoint)",
    )
    for flag, parse, default, metavar in (
        ("--mem-fraction-static", _share, default_of(EngineConfig, "mem_fraction_static"), "F"),
        ("--chunk-size", _count, GPU_DEFAULTS.chunk_size, "N"),
        ("--max-batch-size", _batch_size, GPU_DEFAULTS.max_batch_size, "N"),
        ("--page-size", _count, default_of(EngineConfig, "page_size"), "N"),
        ("--tp", _degree, default_of(ClusterOptions, "tp"), "N"),
        ("--prefill-tp", _degree, None, "N"),
        ("--decode-tp", _degree, None, "N"),
        ("--workers-per-gpu", _workers_per_gpu, default_of(EngineConfig, "workers_per_gpu"), "N"),
        ("--max-loras", _number_of_slots, default_of(EngineConfig, "max_loras"), "N"),
        ("--max-lora-rank", _lora_rank, default_of(EngineConfig, "max_lora_rank"), "N"),
    ):
        shown = "--tp" if default is None else "%(default)s"
        served.add_argument(flag, type=parse, default=default, metavar=metavar, help=f"(default: {shown})")
    served.add_argument(
        "--speculation",
        metavar="draft:MODEL|eagle:DIR|mtp",
        help="model that drafts; needs --drafted (default: none)",
    )
    served.add_argument(
        "--mixed-steps",
        choices=(ON, OFF),
        default=default_of(ClusterOptions, "mixed_steps"),
        help="whether workers of role both prefill and decode in the same forward pass (default: %(default)s)",
    )
    served.add_argument(
        "--itl-objective",
        type=_positive,
        default=0.0,
        metavar="MS",
        help="ITL that workers of role both keep to beside prompts (default: the limit on itl)",
    )
    served.add_argument(
        "--kv-cache-dtype",
        choices=tuple(KV_CACHE_DTYPES),
        default=default_of(EngineConfig, "kv_cache_dtype"),
        help="auto is bfloat16 (default: %(default)s)",
    )


def _workload(text: str) -> tuple[int, int] | str:
    if text in TRACES:
        return text
    found = _WORKLOAD.fullmatch(text)
    try:
        prompt_len, output_len = (int(part.replace(",", "")) for part in found.groups()) if found else (0, 0)
    except ValueError:
        prompt_len = output_len = 0
    if prompt_len < 1 or output_len < 1:
        raise argparse.ArgumentTypeError(
            f"must be two numbers of tokens, each at least 1, such as 4096/256, or {' or '.join(TRACES)}, not {text!r}"
        )
    return prompt_len, output_len


def _duration(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _limits(text: str) -> dict[str, float]:
    limits: dict[str, float] = {}
    for item in text.split(","):
        name, equals, value = item.strip().partition("=")
        if not equals or name not in _LIMITS or name in limits:
            raise argparse.ArgumentTypeError(f"must be of ttft=TIME and itl=TIME, each once, not {text!r}")
        try:
            limits[name] = parse_duration(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if limits[name] <= 0:
            raise argparse.ArgumentTypeError(f"the limit on {name} must be above 0")
    return limits


def _share(text: str) -> float:
    share = _number(text)
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, not {text}")
    return share


def _part(text: str) -> float:
    part = _number(text)
    if not 0 <= part <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, not {text}")
    return part


def _drafts(text: str) -> float:
    number = _number(text)
    if not 0 <= number <= _MAX_DRAFTS:
        raise argparse.ArgumentTypeError(f"must be from 0 to {_MAX_DRAFTS}, not {text}")
    return number


def _positive(text: str) -> float:
    number = _number(text)
    if not (number > 0 and isfinite(number)):
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return number


def _figure(text: str) -> float:
    figure = _number(text)
    if not _SMALLEST_FIGURE <= figure <= _LARGEST_FIGURE:
        raise argparse.ArgumentTypeError(f"must be from {_SMALLEST_FIGURE:g} to {_LARGEST_FIGURE:,}, not {text}")
    return figure


def _batch_size(text: str) -> int:
    size = _count(text)
    if size > _MAX_BATCH_SIZE:
        raise argparse.ArgumentTypeError(f"must be at most {_MAX_BATCH_SIZE:,}")
    return size


def _workers_per_gpu(text: str) -> int:
    num_workers = _count(text)
    if num_workers > MAX_WORKERS_PER_GPU:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_WORKERS_PER_GPU}")
    return num_workers


def _degree(text: str) -> int:
    degree = _count(text)
    if degree > MAX_DEGREE:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_DEGREE}")
    return degree


def _number_of_slots(text: str) -> int:
    number = 0 if text == "0" else _count(text)
    if number > MAX_LORAS:
        raise argparse.ArgumentTypeError(f"must be 0 to {MAX_LORAS}, not {number}")
    return number


def _lora_rank(text: str) -> int:
    rank = _count(text)
    if rank > MAX_LORA_RANK:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_LORA_RANK}")
    return rank


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text[:_MAX_SHOWN]!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number
