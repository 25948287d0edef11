"""FLOP, bytes and floors of a worker's forward passes, with drafts. docs/estimate.md explains the formulas."""

from typing import NamedTuple

from tandem.deploy.estimate.drafts import (
    drafter_flops,
    drafter_kv_bytes,
    drafter_prompt_flops,
    drafter_weight_bytes,
)
from tandem.deploy.estimate.worker import Worker
from tandem.engine.floors import decode_floor, decode_flops, prefill_floor, prefill_flops, read_weight_bytes


class Work(NamedTuple):
    """Attributes: num_bytes: read from the GPU's memory; floor_s: lower bound of the time, in seconds."""

    flops: int
    num_bytes: int
    floor_s: float


def prefill_work(worker: Worker, num_tokens: int, num_before: int) -> Work:
    """Returns the work of one prompt, and of the drafter's layers. Args: num_before: cached tokens before it."""
    model, limits, drafter = worker.model, worker.gpu.limits, worker.drafter
    flops = float(prefill_flops(model, 1, num_tokens, num_before))
    num_bytes = read_weight_bytes(model, num_tokens)
    floor_s = prefill_floor(model, limits, 1, num_tokens, num_before)
    if drafter is not None:
        flops += drafter_prompt_flops(drafter.without_quantization(), 1, num_tokens, num_before)
        of_drafter = drafter_weight_bytes(drafter, num_tokens)
        num_bytes += of_drafter
        computing_s = drafter_prompt_flops(drafter, 1, num_tokens, num_before) / limits.matmul_rate
        floor_s += max(of_drafter / limits.copy_bandwidth, computing_s)
    return Work(round(flops), num_bytes, floor_s)


def decode_work(worker: Worker, batch_size: int, kv_len: int) -> Work:
    """Returns the work of a decode step, and of the drafter's passes. Args: kv_len: tokens of each sequence."""
    model, limits, drafter = worker.model, worker.gpu.limits, worker.drafter
    num_rows = worker.num_rows(batch_size)
    flops = float(decode_flops(model, num_rows))
    num_bytes = float(read_weight_bytes(model, num_rows) + batch_size * kv_len * worker.kv_bytes_per_token)
    floor_s = decode_floor(model, limits, batch_size, kv_len, worker.kv_cache_dtype, num_rows)
    if drafter is not None:
        kv_bytes = batch_size * kv_len * drafter_kv_bytes(drafter)
        # The last pass computes all rows of the step.
        for rows, num_passes in ((batch_size, worker.num_passes(batch_size) - 1), (num_rows, 1)):
            of_pass = drafter_weight_bytes(drafter, rows) + kv_bytes
            computing_s = drafter_flops(drafter, rows, rows) / limits.matmul_rate
            flops += num_passes * drafter_flops(drafter.without_quantization(), rows, rows)
            num_bytes += num_passes * of_pass
            floor_s += num_passes * max(of_pass / limits.copy_bandwidth, computing_s)
    return Work(round(flops), round(num_bytes), floor_s)
