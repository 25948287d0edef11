"""Runs `tandem estimate`."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import inf, isfinite
from typing import Any

from rich.console import Console
from rich.table import Table

from tandem import exit_codes
from tandem.config import ROLES, default_of
from tandem.deploy.cli.estimate_trace import estimate_bounds, print_bounds, read_trace
from tandem.deploy.config.cluster_options import ON, OPTIONS
from tandem.deploy.config.options import in_flags
from tandem.deploy.estimate.bounds import mean_of
from tandem.deploy.estimate.gpus import GIB, GPUS, Gpu
from tandem.deploy.estimate.model import read_drafter_of, read_model
from tandem.deploy.estimate.rates import (
    MAX_GPUS,
    Load,
    Split,
    decode_rate,
    largest_batch,
    num_ranks_of,
    prefill_rate,
    prefill_s,
    prompt_of_load,
    splits,
    splits_for,
)
from tandem.deploy.estimate.work import decode_work, prefill_work
from tandem.deploy.estimate.worker import Worker
from tandem.engine.config import EngineConfig
from tandem.engine.floors import read_weight_bytes

_GIVEN = "figures as they were given; shares of them as on an H200 are assumed"
_BATCH_SIZES = (1, 8, 32, 128, 256)


def run_estimate(arguments: argparse.Namespace) -> int:
    """Returns the exit status: 1 if MAX_GPUS do not reach the rate."""
    try:
        gpu = _gpu(arguments).shared_by(arguments.workers_per_gpu)
        degrees = arguments.prefill_tp or arguments.tp, arguments.decode_tp or arguments.tp
        model = read_model(arguments.model, arguments.quantization)
        worker = Worker(
            model,
            gpu.joined(degrees[0]),
            arguments.mem_fraction_static,
            arguments.chunk_size,
            arguments.max_batch_size,
            arguments.page_size,
            arguments.kv_cache_dtype,
            arguments.mixed_steps == ON,
            arguments.workers_per_gpu,
            arguments.itl_objective / 1e3,
            degrees[0],
            arguments.max_loras,
            arguments.max_lora_rank,
            arguments.drafted,
            read_drafter_of(arguments.speculation, arguments.model, model, arguments.quantization),
        )
        decoder = None
        if degrees[1] != degrees[0]:
            decoder = replace(worker, gpu=gpu.joined(degrees[1]), degree=degrees[1])
        # Also refuses a trace for other workloads.
        arrivals = None
        if arguments.trace or isinstance(arguments.workload, str):
            arrivals = read_trace(arguments)
        prompt_len, output_len = mean_of(arrivals) if arrivals else arguments.workload
        if worker.drafter is not None and not worker.num_drafts:
            raise ValueError(
                f"--speculation {arguments.speculation} needs --drafted K and --accepted K, the drafts of a step "
                "for each request, and those accepted: count them on a cluster (docs/estimate.md), or try 1 and 0.7"
            )
        if arguments.accepted > arguments.drafted:
            raise ValueError(f"--accepted {arguments.accepted:g} is more than --drafted {arguments.drafted:g}")
        limits = arguments.slo
        load = Load(
            prompt_len,
            output_len,
            limits.get("ttft", inf),
            limits.get("itl", inf),
            arguments.good_share,
            arguments.hit_rate,
            arguments.store_hit_rate,
            arguments.accepted,
        )
        longest = worker.model.max_position_embeddings
        num_tokens = (
            max(arrival.prompt_len + arrival.output_len for arrival in arrivals) if arrivals else load.num_tokens
        )
        if num_tokens > longest:
            raise ValueError(f"a request of {num_tokens} tokens is longer than the model allows, {longest}")
        found = estimate(worker, load, decoder)
        shared: list[Split] | None = None
        if arrivals:
            # The longest request must fit too.
            worker.pool_tokens("both", num_tokens)
            found["bounds"] = estimate_bounds(worker, load, arrivals, arguments.start_time)
        elif arguments.rate:
            shared = splits_for(worker, load, arguments.rate, decoder)
        elif arguments.gpus:
            if arguments.gpus > MAX_GPUS:
                raise ValueError(f"--gpus must be at most {MAX_GPUS}: more are not looked at")
            shared = splits(worker, load, arguments.gpus, decoder)
    except (ValueError, OSError) as error:
        print(f"{arguments.name}: {in_flags(str(error), OPTIONS)}", file=sys.stderr)
        return exit_codes.USAGE
    except ModuleNotFoundError as error:
        # A client install cannot download or convert models.
        package = error.name if error.name == "huggingface_hub" else "'tandem-llm[serve]'"
        advice = f"pip install {package}, or give a directory with its config.json"
        print(f"{arguments.name}: {arguments.model} cannot be read without {error.name}: {advice}", file=sys.stderr)
        return exit_codes.USAGE
    if arguments.json:
        found["splits"] = None if shared is None else [asdict(split) for split in shared]
        print(json.dumps(found, indent=2))
    else:
        _print(worker, load, found)
        if arrivals:
            print_bounds(found["bounds"], load)
        if shared:
            _print_splits(shared, arguments.rate, worker, decoder or worker)
    if shared == []:
        print(f"{arguments.name}: {_why_not(found, arguments.rate)}", file=sys.stderr)
        return exit_codes.FAILED
    return 0


def estimate(worker: Worker, load: Load, other_decoder: Worker | None = None) -> dict[str, Any]:
    """Returns the figures of one worker, in seconds, bytes, FLOP and tokens. An unbounded rate is None.

    Args:
        other_decoder: a decode worker of another degree.

    Raises:
        ValueError: a request does not fit a worker's pool.
    """
    gpu, decoder = worker.gpu, other_decoder or worker
    of_roles = {"prefill": worker, "decode": decoder} | ({"both": worker} if other_decoder is None else {})
    pool_tokens = {role: of_roles[role].pool_tokens(role, load.num_tokens) for role in ROLES if role in of_roles}
    largest = min(decoder.max_batch_size, pool_tokens["decode"] // load.num_tokens)
    of_decode = decode_rate(decoder, load)
    prompt = prompt_of_load(worker, load)
    of_prompt = prefill_work(worker, prompt.num_computed, prompt.num_before)
    slower = min(worker, decoder, key=lambda one: one.gpu.reached_link)
    return {
        "gpu": {
            "name": gpu.name,
            "source": gpu.source,
            "memory": gpu.memory,
            "copy_bandwidth": gpu.limits.copy_bandwidth,
            "matmul_rate": gpu.limits.matmul_rate,
            "link_bandwidth": gpu.reached_link,
            "host_link_bandwidth": gpu.reached_host_link,
            "workers": worker.workers_per_gpu,
        },
        "ranks": {role: of.degree for role, of in of_roles.items()},
        "weight_bytes": worker.weight_bytes,
        "slot_bytes": worker.slot_bytes * worker.degree,
        "host_cache_bytes": int(default_of(EngineConfig, "lora_host_memory") * GIB) if worker.max_loras else 0,
        "kv_bytes_per_token": round(worker.page_bytes_per_token),
        "pool_tokens": pool_tokens,
        "prefill": {
            "cached_tokens": prompt.num_cached,
            "loaded_tokens": prompt.num_loaded,
            "computed_tokens": prompt.num_computed,
            "flops": of_prompt.flops,
            "weight_bytes": of_prompt.num_bytes,
            "floor_s": of_prompt.floor_s,
            "estimate_s": prefill_s(worker, prompt),
            "loading_s": prompt.loading_s,
        },
        "decode": [
            {
                "batch_size": size,
                "drafts": decoder.num_drafts_of(size),
                "flops": step.flops,
                "bytes": step.num_bytes,
                "floor_s": step.floor_s,
                "estimate_s": decoder.decode_step(size, load.kv_len),
            }
            for size in sorted({*(size for size in _BATCH_SIZES if size < largest), largest})
            for step in [decode_work(decoder, size, load.kv_len)]
        ],
        "transfer": {
            "bytes": round(load.prompt_len * worker.page_bytes_per_token),
            "whole_s": slower.transfer(load.prompt_len),
            "last_chunk_s": slower.transfer((load.prompt_len - 1) % worker.chunk_size + 1),
        },
        "prefill_worker_rate": prefill_rate(worker, load, 1),
        "decode_worker_rate": of_decode if isfinite(of_decode) else None,
        "decode_batch_size": largest_batch(decoder, load),
    }


def _why_not(found: dict[str, Any], rate: float) -> str:
    if not found["prefill_worker_rate"]:
        return f"no number of GPUs keeps to the limit on ttft: {_prompt_alone(_alone_s(found))}"
    if found["decode_worker_rate"] == 0:
        return f"no number of GPUs keeps to the limit on itl: {_step_alone(found)}"
    return f"{MAX_GPUS} GPUs do not give {rate:g} requests a second"


def _alone_s(found: dict[str, Any]) -> float:
    """Returns the TTFT without a queue, in seconds."""
    return float(found["prefill"]["loading_s"] + found["prefill"]["estimate_s"])


def _prompt_alone(seconds: float) -> str:
    return f"a prompt alone takes {_ms(seconds)}"


def _step_alone(found: dict[str, Any]) -> str:
    return f"a decode step of one request takes {_ms(found['decode'][0]['estimate_s'])}"


def _gpu(arguments: argparse.Namespace) -> Gpu:
    given: dict[str, Any] = {
        name: value
        for name, value in (
            ("memory", arguments.gpu_memory and int(arguments.gpu_memory * 1e9)),
            ("bandwidth", arguments.bandwidth and arguments.bandwidth * 1e9),
            ("flops", arguments.flops and arguments.flops * 1e12),
            ("link", arguments.link and arguments.link * 1e9),
            ("host_link", arguments.host_link and arguments.host_link * 1e9),
        )
        if value
    }
    if arguments.gpu:
        known = GPUS[arguments.gpu]
        return replace(known, **given, source=f"{known.source}; {_GIVEN}") if given else known
    if len(given.keys() - {"host_link"}) < 4:
        raise ValueError("give --gpu, or all of --gpu-memory, --bandwidth, --flops and --link")
    return Gpu("GPU", **given, has_own_kernels=False, source=_GIVEN)


def _print(worker: Worker, load: Load, found: dict[str, Any]) -> None:
    gpu, pools, prefill, transfer = found["gpu"], found["pool_tokens"], found["prefill"], found["transfer"]
    of_token = ""
    if worker.model.experts is not None:
        of_token = f", of which a step of one token reads {read_weight_bytes(worker.model, 1) / 1e9:.2f}"
    print(
        f"{gpu['name']}: {gpu['memory'] / 2**30:.1f} GiB; reached are {gpu['copy_bandwidth'] / 1e12:.2f} TB/s, "
        f"{gpu['matmul_rate'] / 1e12:.0f} TFLOP/s and {gpu['link_bandwidth'] / 1e9:.0f} GB/s to another GPU"
        f"{', by each of ' + str(gpu['workers']) + ' workers that are always busy' if gpu['workers'] > 1 else ''}\n"
        f"  ({gpu['source']})\n"
        f"weights: {found['weight_bytes'] / 1e9:.2f} GB{of_token}; KV: {found['kv_bytes_per_token']:,} bytes a token\n"
        f"{_adapters(worker, found)}"
        f"pool: {pools['prefill']:,} tokens in a prefill worker, {pools['decode']:,} in a decode worker"
        f"{', {:,} in one of role both'.format(pools['both']) if 'both' in pools else ''}\n"
        f"handover: {transfer['bytes'] / 1e6:,.0f} MB of KV, {_ms(transfer['whole_s'])} in all, "
        f"{_ms(transfer['last_chunk_s'])} of it after the prompt's last chunk\n" + _loads(load, found)
    )
    drafts = ("drafts",) if worker.num_drafts else ()
    table = _table("what", *drafts, "TFLOP", "GB read", "floor", "estimate")
    read = prefill["weight_bytes"] / 1e9
    name = f"prefill of {prefill['computed_tokens']:,} tokens"
    if before := load.prompt_len - prefill["computed_tokens"]:
        name += f" behind {before:,}"
    figures = (_ms(prefill["floor_s"]), _ms(prefill["estimate_s"]))
    table.add_row(name, *("" for _ in drafts), f"{prefill['flops'] / 1e12:,.2f}", f"{read:,.1f}", *figures)
    for step in found["decode"]:
        name = f"decode step of {step['batch_size']} with {load.kv_len:,} tokens"
        figures = (_ms(step["floor_s"]), _ms(step["estimate_s"]))
        num_drafts = (f"{step['drafts'] * step['batch_size']:.0f}" for _ in drafts)
        table.add_row(name, *num_drafts, f"{step['flops'] / 1e12:,.2f}", f"{step['bytes'] / 1e9:,.1f}", *figures)
    _show(table)
    of_decode, batch_size = found["decode_worker_rate"], found["decode_batch_size"]
    print(
        f"\na prefill worker serves {_rate(found['prefill_worker_rate'])} requests a second"
        + ("" if found["prefill_worker_rate"] else f" ({_prompt_alone(_alone_s(found))}, beyond ttft)")
        + ", a decode worker "
        + ("any number" if of_decode is None else _rate(of_decode))
        + (f" ({_step_alone(found)}, beyond itl)" if of_decode == 0 else "")
        + (f", at most {batch_size} at once" if of_decode else "")
    )


def _adapters(worker: Worker, found: dict[str, Any]) -> str:
    if not worker.max_loras:
        return ""
    return (
        f"adapters: {found['slot_bytes'] / 1e9:.2f} GB for {worker.max_loras} of rank {worker.max_lora_rank}, "
        f"and up to {found['host_cache_bytes'] / 1e9:.1f} GB of host memory (--lora-host-memory), in each worker\n"
    )


def _loads(load: Load, found: dict[str, Any]) -> str:
    if not load.store_hit_rate:
        return ""
    prefill = found["prefill"]
    if not prefill["loaded_tokens"]:
        return "page store: no loads, because computing is faster\n"
    rate = found["gpu"]["host_link_bandwidth"] / 1e9
    return f"page store: {prefill['loaded_tokens']:,} tokens in {_ms(prefill['loading_s'])} at {rate:.0f} GB/s\n"


def _print_splits(shared: Sequence[Split], rate: float | None, worker: Worker, decoder: Worker) -> None:
    num_ranks = max(num_ranks_of(split, worker, decoder) for split in shared)
    asked = f" for {rate:g} requests a second" if rate else ""
    num_gpus = -(-num_ranks // worker.workers_per_gpu)
    print(f"\n{num_gpus} GPU{'s' if num_gpus > 1 else ''}{asked}, prefill:decode workers, the best first:\n")
    table = _table("split", "requests/s", "limited by", "decode batch", "prompt tokens a forward")
    for split in shared:
        table.add_row(
            str(split), _rate(split.rate), split.bottleneck, str(split.batch_size or ""), str(split.chunk_size or "")
        )
    _show(table)
    for split in shared:
        # The reason of the other splits is in the rates of their workers.
        if split.num_both and "ttft" in split.bottleneck:
            print(f"\n{split}: in chunks, {_prompt_alone(split.ttft_alone_s)}, beyond ttft")


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _show(table: Table) -> None:
    Console(highlight=False).print(table)


def _rate(rate: float) -> str:
    if 0 < rate < 0.1:
        return f"{rate:.2g}"
    return f"{rate:.{2 if 0 < rate < 1 else 1}f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.{1 if seconds >= 0.01 else 2}f} ms"
