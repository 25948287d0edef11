"""Measures how evenly a model's tokens choose experts, against the even choice that floors assume (engine/floors.py).

One forward pass computes all prompts. For each sparse layer: tokens of the most chosen expert over the mean, and the
mean number of distinct experts of random batches of tokens.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tandem import exit_codes
from tandem.engine.attention.choice import choose_backend
from tandem.engine.batch import Batch
from tandem.engine.build import why_no_gpu
from tandem.engine.config import EngineConfig
from tandem.engine.kvcache.pool import CpuKvPool, KvPool
from tandem.engine.layers.experts.base import Experts
from tandem.engine.layers.experts.routing import choose_experts, router_logits
from tandem.engine.layers.linear import LinearBase
from tandem.engine.layers.norm import Norm, rms_norm
from tandem.engine.layers.ops import LayerOps, TorchOps
from tandem.engine.models.config import ModelConfig
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.experts import ExpertsConfig
from tandem.engine.page_layout import page_layout_of
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.weights.loader import load_weights

BATCH_SIZES = (1, 8, 32, 128, 256)
NUM_DRAWS = 200
PAGE_SIZE = 16


class RecordingOps(LayerOps):
    """Passes each operation on.

    Attributes:
        chosen: experts of each sparse layer's tokens in the order of calls, (num_tokens, num_chosen) int64 on the host.
    """

    def __init__(self, ops: LayerOps) -> None:
        self._ops = ops
        self.chosen: list[torch.Tensor] = []

    def norm_linear(
        self, x: torch.Tensor, norm: Norm, linear: LinearBase, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._ops.norm_linear(x, norm, linear, out)

    def norm_gated(self, x: torch.Tensor, norm: Norm, linear: LinearBase) -> torch.Tensor:
        return self._ops.norm_gated(x, norm, linear)

    def linear_add(self, x: torch.Tensor, linear: LinearBase, residual: torch.Tensor) -> torch.Tensor:
        return self._ops.linear_add(x, linear, residual)

    def gated_mlp(self, x: torch.Tensor, norm: Norm, gate_up: LinearBase, down: LinearBase) -> torch.Tensor:
        return self._ops.gated_mlp(x, norm, gate_up, down)

    def mixture(
        self, x: torch.Tensor, norm: Norm, experts: Experts, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight, bias, routing = experts.router
        logits = router_logits(rms_norm(x, *norm), weight, routing)
        self.chosen.append(choose_experts(logits, bias, routing)[1].cpu())
        return self._ops.mixture(x, norm, experts, residual)

    def normalize(self, x: torch.Tensor, norm: Norm) -> None:
        self._ops.normalize(x, norm)


@dataclass(frozen=True, slots=True)
class Skew:
    """Choices of one layer.

    Attributes:
        max_over_mean: tokens of the most chosen expert over those of the mean one.
        num_touched: mean distinct experts of a batch, by its number of tokens.
    """

    layer: int
    max_over_mean: float
    num_touched: dict[int, float]


def skew_of(layer: int, chosen: torch.Tensor, num_experts: int, batch_sizes: Sequence[int]) -> Skew:
    """Args: chosen: (num_tokens, num_chosen) int64."""
    num_tokens, num_chosen = chosen.shape
    counts = torch.bincount(chosen.flatten(), minlength=num_experts)
    rng = random.Random(layer)
    touched = {
        size: statistics.mean(len(chosen[rng.sample(range(num_tokens), size)].unique()) for _ in range(NUM_DRAWS))
        for size in batch_sizes
        if size <= num_tokens
    }
    return Skew(layer, counts.max().item() * num_experts / (num_tokens * num_chosen), touched)


@torch.inference_mode()
def record(engine: EngineConfig, prompts: Sequence[Sequence[int]]) -> dict[int, torch.Tensor]:
    """Returns the experts that each token of the prompts chose, by sparse layer: (num_tokens, num_chosen) int64.

    Raises:
        ValueError: the model's weights are missing or invalid, or a prompt is not one of the model.
    """
    config = ModelConfig.from_dir(Path(engine.model_dir)).quantized(engine.quantization)
    for prompt in prompts:
        if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
            raise ValueError(f"token ids must be below {config.vocab_size}, not {min(prompt)} to {max(prompt)}")
        if len(prompt) > config.max_position_embeddings:
            raise ValueError(f"a prompt has {len(prompt)} tokens, but at most {config.max_position_embeddings} fit")
    device, dtype = torch.device(engine.device), getattr(torch, engine.dtype)
    # Only GPUs keep FP8 weights.
    held = replace(config, quantization=None) if device.type == "cpu" else config
    ops = RecordingOps(_ops(device))
    model = DecoderModel(held, dtype, device, ops)
    load_weights(model, Path(engine.model_dir), engine.load_format, config.quantization, device, lambda doing: None)
    layout = page_layout_of(config, PAGE_SIZE, engine.dtype, "auto")
    sequences: list[TokenSequence] = []
    num_pages = 0
    for prompt in prompts:
        num_needed = layout.num_pages_for(len(prompt))
        pages = list(range(num_pages, num_pages + num_needed))
        num_pages += num_needed
        sequences.append(TokenSequence(list(prompt), len(prompt), pages, cached_len=0))
        sequences[-1].extend(len(prompt))
    pool: KvPool
    if device.type == "cpu":
        pool = CpuKvPool(layout, num_pages, "expert-skew")
    else:
        from tandem.engine.kvcache.cuda_pool import CudaKvPool

        pool = CudaKvPool(layout, num_pages, device)
    attention = choose_backend(engine, layout, config.num_q_heads, device)(pool, config.num_q_heads)
    batch = Batch("prefill", sequences)
    attention.plan(batch)
    model.hidden_states(batch.input_ids(device), batch.positions(device), attention)
    pool.close()
    layers = [layer for layer in range(config.num_layers) if config.is_sparse(layer)]
    return dict(zip(layers, ops.chosen, strict=True))


def _ops(device: torch.device) -> LayerOps:
    if device.type == "cpu":
        return TorchOps()
    from tandem.engine.layers.cuda_ops import CudaOps

    return CudaOps(device)


def read_prompts(path: Path) -> list[list[int]]:
    """Reads a prompt's token ids from each line. Raises ValueError: there are none, or a line has another word."""
    prompts = [[int(word) for word in line.split()] for line in path.read_text().splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"{path} has no token ids")
    return prompts


def show(skews: Sequence[Skew], experts: ExpertsConfig, title: str, console: Console) -> None:
    table = Table("layer", "max / mean", title=title)
    sizes = list(skews[0].num_touched)
    for size in sizes:
        table.add_column(f"experts of {size}", justify="right")
    for skew in skews:
        touched = [f"{skew.num_touched[size]:.1f}" for size in sizes]
        table.add_row(str(skew.layer), f"{skew.max_over_mean:.2f}", *touched)
    table.add_section()
    means = [statistics.mean(skew.num_touched[size] for skew in skews) for size in sizes]
    mean = statistics.mean(skew.max_over_mean for skew in skews)
    table.add_row("mean", f"{mean:.2f}", *(f"{touched:.1f}" for touched in means))
    table.add_row("even choice", "1.00", *(f"{experts.num_touched(size):.1f}" for size in sizes))
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a model's directory")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--token-ids", type=Path, metavar="FILE", help="token ids, a prompt a line (default: random)")
    parser.add_argument("--num-prompts", type=int, default=16, help="random prompts")
    parser.add_argument("--prompt-len", type=int, default=128, help="tokens of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    arguments = parser.parse_args(argv)
    dtype = "float32" if arguments.device == "cpu" else "bfloat16"
    try:
        model = ModelConfig.from_dir(arguments.model)
        if model.experts is None:
            raise ValueError(f"{arguments.model} is a model without experts")
        if arguments.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"{why_no_gpu()}; use --device cpu")
        if min(arguments.num_prompts, arguments.prompt_len) < 1:
            raise ValueError("--num-prompts and --prompt-len must be at least 1")
        if arguments.token_ids is not None:
            prompts = read_prompts(arguments.token_ids)
        else:
            rng = random.Random(0)
            prompts = [
                rng.choices(range(model.vocab_size), k=arguments.prompt_len) for _ in range(arguments.num_prompts)
            ]
        engine = EngineConfig(
            str(arguments.model), load_format=arguments.load_format, device=arguments.device, dtype=dtype, num_pages=1
        )
        chosen = record(engine, prompts)
    except (ValueError, OSError) as error:
        parser.exit(exit_codes.USAGE, f"{parser.prog}: {error}\n")
    skews = [skew_of(layer, of_layer, model.experts.num_experts, BATCH_SIZES) for layer, of_layer in chosen.items()]
    num_tokens = sum(map(len, prompts))
    show(skews, model.experts, f"{arguments.model.name}, {num_tokens} tokens", Console(width=100))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(skew) for skew in skews], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
