"""Scales of quantized pages from a checkpoint, and their effect on pages."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.attention.layout import KvHeadLayout
from tandem.engine.attention.scales import KvScales
from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.models.build import build_model
from tandem.engine.models.config import ModelConfig
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.weights.kv_scales import ScaleReader
from tandem.engine.weights.loader import dummy_weights
from tandem.messages import PageFormat

PROMPT = list(range(1, 31))


@pytest.fixture
def checkpoint(model_dir: str) -> Callable[..., str]:
    """Write a checkpoint of the tiny model with the given tensors added; return its path."""
    model = build_model(ModelConfig.from_dir(Path(model_dir)), torch.float32, torch.device("cpu"))
    shapes = [(name, tuple(weight.shape), weight.dtype) for name, weight in model.named_parameters()]

    def write(**scales: float) -> str:
        added = {name.replace("__", "."): torch.tensor(scale) for name, scale in scales.items()}
        # Larger than dummy weights, so that keys and values have some size.
        weights = {name: weight * (1 if weight.dim() == 1 else 30) for name, weight in dummy_weights(shapes)}
        save_file(weights | added, Path(model_dir) / "model.safetensors")
        return model_dir

    return write


def build(model_dir: str, kv_cache_dtype: str) -> Engine:
    engine = build_engine(
        EngineConfig(model_dir, num_pages=4, kv_cache_dtype=kv_cache_dtype), "kv-scales", list[str]().append
    )
    engine.pool.close()
    return engine


def page_format(engine: Engine) -> PageFormat:
    return PageFormat(engine.model_fingerprint, engine.pool.layout.page_bytes, engine.pool.layout.tag)


def written(engine: Engine) -> torch.Tensor:
    """Return a prompt's KV in its pages: (num_layers, 2, num_tokens, num_kv_heads, head_dim)."""
    sequence = TokenSequence(PROMPT, len(PROMPT), [2, 1])
    sequence.extend(len(PROMPT))
    engine.forward(Batch("prefill", [sequence])).token_ids()
    layout = engine.pool.layout
    assert isinstance(layout, KvHeadLayout)
    pages = layout.view(engine.pool.memory)[[2, 1]].float()
    return torch.cat(tuple(pages), dim=2)[:, :, : len(PROMPT)]


def test_scale_names_are_read_and_missing_ones_default_to_one(checkpoint: Callable[..., str]) -> None:
    layer_0, layer_1 = "model__layers__0__self_attn__", "model__layers__1__self_attn__"
    scales = {f"{layer_0}k_scale": 0.5, f"{layer_0}v_scale": 2.0, f"{layer_1}v_proj__v_scale": 0.125}
    exact = written(build(checkpoint(**scales), "auto"))
    in_pages = written(build(checkpoint(**scales), "fp8_e4m3"))
    stand_for = in_pages * torch.tensor([[0.5, 2.0], [1.0, 0.125]])[:, :, None, None, None]
    # The first layer's inputs are exact, so numbers away from 0 are off by a sixteenth at most.
    first, first_exact = stand_for[0], exact[0]
    assert ((first - first_exact).abs() <= first_exact.abs() / 16 + 2.0**-9).all()
    assert (stand_for[1] - exact[1]).norm() < 0.1 * exact[1].norm()
    assert not torch.equal(in_pages, written(build(checkpoint(), "fp8_e4m3")))


def test_scales_are_part_of_the_compared_format(checkpoint: Callable[..., str]) -> None:
    name = "model__layers__1__self_attn__k_proj__k_scale"
    plain, one, two = checkpoint(), {name: 1.0}, {name: 2.0}
    without = page_format(build(plain, "fp8_e4m3"))
    assert page_format(build(checkpoint(**one), "fp8_e4m3")) == without
    other = page_format(build(checkpoint(**two), "fp8_e4m3"))
    assert "models differ" in other.mismatch(without, "the sender", "the receiver")


def test_other_page_dtypes_are_refused_with_the_option(checkpoint: Callable[..., str]) -> None:
    model_dir = checkpoint(model__layers__0__self_attn__k_scale=0.5)
    wide, narrow = (page_format(build(model_dir, name)) for name in ("auto", "fp8_e4m3"))
    assert wide.page_bytes == 4 * narrow.page_bytes
    refusal = narrow.mismatch(wide, "the sender", "the receiver")
    assert refusal == (
        "pages differ: kv-by-head/float8_e4m3fn/2x2x16x1x8 of 512 bytes at the sender, kv-by-head/float32/2x2x16x1x8 "
        "of 2048 at the receiver; give both the same --dtype, --kv-cache-dtype and --page-size"
    )


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model.layers.0.self_attn.k_scale": 0.0}, "k_scale is 0.0, which is no scale: it must be above 0"),
        ({"model.layers.0.self_attn.v_scale": float("nan")}, "v_scale is nan, which is no scale"),
        ({"model.layers.2.self_attn.k_scale": 1.0}, r"model\.layers\.2\.self_attn\.k_scale is unexpected"),
        (
            {"model.layers.0.self_attn.k_scale": 1.0, "model.layers.0.self_attn.k_proj.k_scale": 1.0},
            r"k_proj\.k_scale comes twice",
        ),
        ({"model.layers.0.self_attn.k_scale": [1.0, 2.0]}, "has 2 scales; supported is one for a layer"),
    ],
)
def test_invalid_scales_are_refused(tensors: dict[str, object], message: str) -> None:
    reader = ScaleReader(2)
    with pytest.raises(ValueError, match=message):
        list(reader.without_scales((name, torch.tensor(value)) for name, value in tensors.items()))


def test_other_tensors_are_accepted() -> None:
    reader = ScaleReader(3)
    scale = torch.tensor([0.25], dtype=torch.bfloat16)
    others = ["model.layers.0.self_attn.q_scale", "model.layers.0.self_attn.k_proj.v_scale", "lm_head.weight"]
    names = [*others, "model.layers.1.self_attn.k_scale", "model.layers.2.self_attn.v_proj.output_scale"]
    assert [name for name, _ in reader.without_scales((name, scale) for name in names)] == others
    assert reader.scales() == KvScales((1.0, 0.25, 1.0), (1.0, 1.0, 0.25))


def test_a_checkpoint_with_scales_is_served_without_quantized_pages_too(checkpoint: Callable[..., str]) -> None:
    scaled = written(build(checkpoint(model__layers__0__self_attn__k_scale=0.5), "auto"))
    tensors = load_file(Path(checkpoint()) / "model.safetensors")
    assert "model.layers.0.self_attn.k_scale" not in tensors
    assert torch.equal(scaled, written(build(checkpoint(), "auto")))
