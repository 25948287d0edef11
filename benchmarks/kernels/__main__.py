"""Times the kernels of one engine on one GPU, against the floor that the same run measures.

decode    each operation of a decode step's layer
prefill   each operation of a prefill's layer, and how the GPU's rate falls under sustained load
products  each matrix of a layer by every available kernel, in bfloat16 and FP8
experts   the kernels of a layer's experts, in bfloat16 and FP8
adapters  the products of adapters with A and B, beside FlashInfer's segmented products
latents   attention over latents, at the sizes of DeepSeek's models
step      kernels of a whole decode step by name, idle time between steps, and traces for Perfetto

All but the last run an operation for every layer of the model in one CUDA graph, so that no matrix is cached when its
turn comes, and print the median microseconds of one layer.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine_limits import measure_limits, sustained_matmul_rate
from benchmarks.engine_loop import add_engine_arguments, open_model
from tandem.engine.config import KV_CACHE_DTYPES, QUANTIZATIONS
from tandem.engine.models.config import ModelConfig

EXPERT_TOKENS = (16, 32, 64, 128, 256, 512, 1024)
ADAPTED_TOKENS = (32, 128, 8192)
TOKENS = (1, 8, 16, 17, 32, 48, 64, 128, 256, 512, 2048, 8192)
PREFILLS = ((2, 8192), (32, 512), (1, 512))
# DeepSeek-V2-Lite's and V3's.
LATENT_HEADS = (16, 128)
LATENT_PROMPTS, LATENT_PREFIXES = (64, 128, 256, 1024), (0, 1024, 8192, 16_384, 31_744)


def prefill_shape(text: str) -> tuple[int, int]:
    """Parse "8x1024" into (8, 1024). Raises argparse.ArgumentTypeError."""
    count, times, length = text.partition("x")
    if not (times and count.isdecimal() and length.isdecimal() and int(count) and int(length)):
        raise argparse.ArgumentTypeError(f"{text!r} is not PROMPTSxTOKENS: write for example 8x1024")
    return int(count), int(length)


@torch.inference_mode()
def decode(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    model = _open_by_head(parser, arguments.model, arguments.quantization)
    # Importing it requires CUDA.
    from benchmarks.kernels.layers import LayerKernels

    limits = measure_limits()
    kernels = LayerKernels(model, limits)
    console = Console(width=100)
    for batch_size in arguments.batch_sizes:
        table = _table("one layer", f"{arguments.model.name}, batch {batch_size}", "µs", "floor, µs", "times the floor")
        for row in kernels.decode_step(batch_size, arguments.kv_len):
            table.add_row(row.name, _figure(row.time), _figure(row.floor), _figure(row.ratio, 2))
        console.print(table)
    console.print(f"copy {limits.copy_bandwidth / 1e12:.2f} TB/s, matmul {limits.matmul_rate / 1e12:.0f} TFLOP/s")


@torch.inference_mode()
def prefill(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    model = _open_by_head(parser, arguments.model, arguments.quantization)
    from benchmarks.kernels.layers import LayerKernels

    limits = measure_limits()
    kernels = LayerKernels(model, limits)
    console = Console(width=100)
    for num_prompts, prompt_len in arguments.forwards:
        title = f"{arguments.model.name}, {num_prompts} x {prompt_len} tokens"
        table = _table("one layer", title, "µs", "floor, µs", "of the floor's rate", "share")
        rows = list(kernels.prefill(num_prompts, prompt_len))
        whole = [row for row in rows if not row.is_part]
        time, floor = sum(row.time or 0 for row in whole), sum(row.floor or 0 for row in whole)
        for row in rows:
            share = "" if row.time is None else f"{row.time / time:.1%}"
            rate = None if row.ratio is None else 1 / row.ratio
            table.add_row(row.name, _figure(row.time), _figure(row.floor), _figure(rate, 2), share)
        table.add_section()
        table.add_row("sum", f"{time:.1f}", f"{floor:.1f}", f"{floor / time:.2f}", "")
        console.print(table)
    rates = f"{limits.matmul_rate / 1e12:.0f} TFLOP/s, {sustained_matmul_rate() / 1e12:.0f} after two seconds"
    console.print(f"copy {limits.copy_bandwidth / 1e12:.2f} TB/s, matmul {rates}")


@torch.inference_mode()
def products(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    kinds = {"bfloat16": QUANTIZATIONS[0], "FP8": "fp8"}
    models = {kind: _open_by_head(parser, arguments.model, quantization) for kind, quantization in kinds.items()}
    from benchmarks.kernels.products import ProductKernels, show

    limits = measure_limits()
    figures = {}
    for kind, model in models.items():
        kernels = ProductKernels(model, limits)
        rows = [row for num_tokens in arguments.tokens for row in kernels.products(num_tokens)]
        show(rows, f"{arguments.model.name}, {kind}, products, microseconds", Console(width=160))
        figures[f"products, {kind}"] = [row._asdict() for row in rows]
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


@torch.inference_mode()
def experts(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    kinds = {"bfloat16": QUANTIZATIONS[0], "FP8": "fp8"}
    models = {kind: open_model(parser, arguments.model, quantization) for kind, quantization in kinds.items()}
    if any(model.experts is None for model in models.values()):
        parser.error(f"{arguments.model} has no experts")
    from benchmarks.kernels.experts import ExpertKernels, show, show_tiles

    limits, console = measure_limits(), Console(width=160)
    figures = {}
    for kind, model in models.items():
        kernels = ExpertKernels(model, limits)
        title = f"{arguments.model.name}, {kind}, experts, microseconds"
        if arguments.tune:
            show_tiles(kernels, arguments.tokens, title, console)
            continue
        rows = [kernels.row(num_tokens) for num_tokens in arguments.tokens]
        show(rows, title, console)
        figures[f"experts, {kind}"] = [row._asdict() for row in rows]
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


@torch.inference_mode()
def adapters(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    model = _open_by_head(parser, arguments.model, QUANTIZATIONS[0])
    from benchmarks.kernels.adapters import AdapterKernels, show

    kernels = AdapterKernels(model, measure_limits(), max(arguments.adapters), arguments.rank)
    rows = [
        row
        for num_tokens in arguments.tokens
        for num_adapters in arguments.adapters
        for row in kernels.rows(num_tokens, num_adapters)
    ]
    show(rows, f"{arguments.model.name}, adapters of rank {arguments.rank}, microseconds", Console(width=120))


@torch.inference_mode()
def latents(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    from benchmarks.kernels.latents import LatentKernels

    limits = measure_limits()
    kernels, console = LatentKernels(limits, KV_CACHE_DTYPES[arguments.kv_cache_dtype]), Console(width=120)
    columns = "tokens of each", "µs", "attention, µs", "latents, µs", "times it", "floor, µs", "times it"
    for num_heads in arguments.heads:
        table = _table("batch", f"decode, {num_heads} heads, one layer", *columns)
        for kv_len in arguments.kv_lens:
            for batch_size in arguments.batch_sizes:
                row = kernels.decode(num_heads, batch_size, kv_len)
                figures = [_figure(row.whole), _figure(row.attention)]
                for floor in (row.latents, row.floor):
                    figures += [_figure(floor), _figure(row.attention / floor, 2)]
                table.add_row(str(batch_size), str(kv_len), *figures)
        console.print(table)
        table = _table("new tokens", f"prompt, {num_heads} heads, one layer", "prefix", "absorbed, µs", "expanded, µs")
        for num_new in arguments.prompts:
            for num_before in arguments.prefixes:
                prompt = kernels.prompt(num_heads, num_new, num_before)
                table.add_row(str(num_new), str(num_before), _figure(prompt.absorbed), _figure(prompt.expanded))
        console.print(table)
    console.print(f"copy {limits.copy_bandwidth / 1e12:.2f} TB/s, matmul {limits.matmul_rate / 1e12:.0f} TFLOP/s")


def step(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    model = open_model(parser, Path(arguments.model), arguments.quantization)
    from benchmarks.kernels.steps import profile_steps

    profile_steps(arguments, model)


def _open_by_head(parser: argparse.ArgumentParser, directory: Path, quantization: str) -> ModelConfig:
    """As open_model, but exits with status 2 for latent attention too: its projections and kernels are others."""
    model = open_model(parser, directory, quantization)
    if model.latent is not None:
        parser.error(f"{directory} has latent attention, which only the parts experts, latents and step time")
    return model


def _figure(value: float | None, num_digits: int = 1) -> str:
    return "" if value is None else f"{value:.{num_digits}f}"


def _table(first: str, title: str, *columns: str) -> Table:
    table = Table(first, title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)

    def add_part(name: str, what: str) -> argparse.ArgumentParser:
        part = parts.add_parser(name, help=what, description=what)
        if name not in ("latents", "step"):
            part.add_argument("--model", type=Path, required=True, help="a directory with a model's config.json")
        return part

    decode_part = add_part("decode", "each operation of a decode step's layer")
    decode_part.add_argument("--batch-sizes", type=int, nargs="+", default=(1, 8, 16, 32, 128))
    decode_part.add_argument("--kv-len", type=int, default=1152, help="tokens of each sequence")
    prefill_part = add_part("prefill", "each operation of a prefill's layer")
    prefill_part.add_argument(
        "--forwards",
        type=prefill_shape,
        nargs="+",
        default=PREFILLS,
        metavar="PROMPTSxTOKENS",
        help="prompts of a forward and tokens of each (default: 2x8192 32x512 1x512)",
    )
    for part in (decode_part, prefill_part):
        part.add_argument("--quantization", choices=QUANTIZATIONS, default=QUANTIZATIONS[0], help="fp8: FP8 weights")
    products_part = add_part("products", "each matrix of a layer by every available kernel")
    products_part.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="(default: %(default)s)")
    products_part.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    experts_part = add_part("experts", "the kernels of a layer's experts")
    experts_part.add_argument("--tokens", type=int, nargs="+", default=EXPERT_TOKENS, help="(default: %(default)s)")
    output = experts_part.add_mutually_exclusive_group()
    output.add_argument("--tune", action="store_true", help="time candidate tiles instead, for tiles.py")
    output.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    adapters_part = add_part("adapters", "the products of adapters")
    adapters_part.add_argument("--tokens", type=int, nargs="+", default=ADAPTED_TOKENS, help="(default: %(default)s)")
    adapters_part.add_argument("--adapters", type=int, nargs="+", default=(1, 8, 64), help="(default: %(default)s)")
    adapters_part.add_argument("--rank", type=int, default=16)
    latents_part = add_part("latents", "attention over latents, at the sizes of DeepSeek's models")
    latents_part.add_argument("--heads", type=int, nargs="+", default=LATENT_HEADS, help="(default: 16 128)")
    latents_part.add_argument("--batch-sizes", type=int, nargs="+", default=(1, 8, 32, 128, 256))
    latents_part.add_argument("--kv-lens", type=int, nargs="+", default=(1024, 16_384), help="tokens of each sequence")
    latents_part.add_argument("--kv-cache-dtype", choices=tuple(KV_CACHE_DTYPES), default="auto", help="of latents")
    latents_part.add_argument("--prompts", type=int, nargs="*", default=LATENT_PROMPTS, help="new tokens of a prompt")
    latents_part.add_argument(
        "--prefixes", type=int, nargs="+", default=LATENT_PREFIXES, help="cached tokens before it"
    )
    step_part = add_part("step", "kernels of a decode step, idle time between steps, and traces for Perfetto")
    add_engine_arguments(step_part)
    step_part.add_argument("--batch-size", type=int, default=64)
    step_part.add_argument("--prompt-len", type=int, default=1024)
    step_part.add_argument("--num-steps", type=int, default=520, help="measured decode steps")
    step_part.add_argument("--out", type=Path, default=Path(), metavar="DIRECTORY", help="for traces (default: here)")
    step_part.add_argument("--nsys", action="store_true", help="run under nsys, with NVTX ranges and no traces")
    arguments = parser.parse_args(argv)
    by_name = {part.__name__: part for part in (decode, prefill, products, experts, adapters, latents, step)}
    by_name[arguments.part](parser, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
