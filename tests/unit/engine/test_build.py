"""Building an engine: attention backend and progress messages."""

import importlib.util
import json
import logging
from pathlib import Path

import pytest
import torch

from tandem.choices import Choices
from tandem.engine import build as build_module
from tandem.engine import cuda_build
from tandem.engine.agreement import agreed_num_pages
from tandem.engine.attention import choice
from tandem.engine.attention.base import AttentionBackend
from tandem.engine.attention.latent_reference import LatentReferenceAttention
from tandem.engine.attention.reference import ReferenceAttention
from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.kvcache.base import PageLayout
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.token_sequence import TokenSequence
from tests.fakes.graphs import FixedSizes
from tests.fakes.model_config import TINY_EXPERTS, TINY_LLAMA
from tests.fakes.rank_threads import ThreadCollectives, ThreadGroup, run_ranks

LATENT_PATH = "tandem.engine.attention.latent_reference:LatentReferenceAttention"


def build(
    model_dir: str, num_pages: int, told: list[str] | None = None, *, backend: str = "auto", dtype: str = "float32"
) -> Engine:
    config = EngineConfig(model_dir, load_format="dummy", num_pages=num_pages, attention_backend=backend, dtype=dtype)
    return build_engine(config, f"build-{num_pages}", list[str]().append if told is None else told.append)


def test_stages_are_reported_in_order_and_timed(model_dir: str, caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    with caplog.at_level(logging.INFO, "tandem.engine.build"):
        engine = build(model_dir, 8, told)
    assert engine.pool.num_pages == 8
    assert list(dict.fromkeys(doing.partition(" (")[0] for doing in told)) == [
        "loading weights",
        "fingerprinting weights",
        "allocating pages",
    ]
    assert caplog.messages[-1].startswith("engine ready: loading weights 0.")
    assert ", allocating pages 0." in caplog.messages[-1]


class OwnAttention(ReferenceAttention):
    pass


class PickyAttention(ReferenceAttention):
    @classmethod
    def why_not(cls, layout: PageLayout, num_q_heads: int, device: torch.device) -> str:
        return f"it computes no {num_q_heads} heads on {device.type}"


class WaitingModel(DecoderModel):
    is_capturable = False


class PlainAttention(ReferenceAttention):
    reads_quantized = False


def test_backend_without_quantized_pages_refuses_them(model_dir: str) -> None:
    path = f"{__name__}:{PlainAttention.__name__}"
    config = EngineConfig(
        model_dir, load_format="dummy", num_pages=4, attention_backend=path, kv_cache_dtype="fp8_e4m3"
    )
    with pytest.raises(ValueError, match=r"^PlainAttention does not read quantized pages: use kv_cache_dtype auto$"):
        build_engine(config, "build-plain", list[str]().append)
    assert build(model_dir, 4, backend=path).pool.num_pages == 4


def test_log_names_the_kv_dtype(model_dir: str, caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(model_dir, load_format="dummy", num_pages=4, kv_cache_dtype="fp8_e4m3")
    with caplog.at_level(logging.INFO, "tandem.engine.loaded_model"):
        build_engine(config, "build-quantized", list[str]().append)
    assert "keys and values are kept as fp8_e4m3; all scales are 1" in caplog.messages


def generate(engine: Engine) -> list[int]:
    sequence = TokenSequence([1, 2, 3], 3, [0])
    sequence.extend(3)
    return engine.forward(Batch("prefill", [sequence])).token_ids()


def test_custom_backend_is_loaded_by_import_path(model_dir: str) -> None:
    engine = build(model_dir, 4, backend=f"{__name__}:{OwnAttention.__name__}")
    assert type(engine._attention) is OwnAttention
    assert generate(engine) == generate(build(model_dir, 4, backend="reference"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (f"{__name__}:{PickyAttention.__name__}", "^it computes no 2 heads on cpu$"),
        (
            f"{__name__}:EngineConfig",
            r"must be a class that derives from tandem.engine.attention.base.AttentionBackend",
        ),
        (f"{__name__}:Nothing", "has no Nothing"),
    ],
)
def test_unusable_backend_is_refused(model_dir: str, path: str, message: str) -> None:
    told: list[str] = []
    with pytest.raises(ValueError, match=message):
        build(model_dir, 4, told, backend=path)
    # Refused before any weight is read.
    assert told == ["loading weights"]


@pytest.mark.parametrize(("dtype", "is_warned_of"), [("bfloat16", True), ("float32", False)])
def test_auto_takes_the_first_suitable_backend(
    model_dir: str, dtype: str, is_warned_of: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    paths = {"picky": f"{__name__}:{PickyAttention.__name__}", "own": f"{__name__}:{OwnAttention.__name__}"}
    table: Choices[AttentionBackend] = Choices("tandem.engine.attention.base:AttentionBackend", paths)
    monkeypatch.setattr(choice, "ATTENTION_BACKENDS", table)
    engine = build(model_dir, 4, dtype=dtype)
    assert type(engine._attention) is OwnAttention
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == ["it computes no 2 heads on cpu: using the slower own backend"] * is_warned_of


def test_auto_without_backend_explains_each(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {"picky": f"{__name__}:{PickyAttention.__name__}"}
    table: Choices[AttentionBackend] = Choices("tandem.engine.attention.base:AttentionBackend", paths)
    monkeypatch.setattr(choice, "ATTENTION_BACKENDS", table)
    with pytest.raises(ValueError, match="no attention backend computes this model: it computes no 2 heads on cpu"):
        build(model_dir, 4)


def test_no_graphs_of_models_that_wait_for_the_device(model_dir: str) -> None:
    engine = build(model_dir, 4)
    graphable = FixedSizes(engine.pool)
    assert cuda_build._for_graphs(graphable, engine.model) is graphable
    assert cuda_build._for_graphs(engine._attention, engine.model) is None
    assert cuda_build._for_graphs(graphable, WaitingModel.__new__(WaitingModel)) is None


@pytest.mark.skipif(importlib.util.find_spec("cuda") is not None, reason="the packages for GPUs are here")
def test_packages_that_a_gpu_needs_are_named(model_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(build_module, "free_bytes", lambda: 2**40)
    with pytest.raises(ValueError, match=r"No module named 'cuda'.*pip install '\.\[cuda13\]'"):
        build_engine(EngineConfig(model_dir, device="cuda", dtype="bfloat16"), "build", list[str]().append)


def test_the_layout_decides_between_backends(
    model_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    latents = write_latent_model(tmp_path / "latents")
    assert type(build(latents, 4)._attention) is LatentReferenceAttention
    assert type(build(model_dir, 4)._attention) is ReferenceAttention
    assert generate(build(latents, 4, backend="latent_reference")) == generate(build(latents, 4))
    with pytest.raises(ValueError, match=r"^ReferenceAttention reads keys and values by head, not pages of latent/flo"):
        build(latents, 4, backend="reference")
    with pytest.raises(ValueError, match=r"^LatentReferenceAttention reads latents, not pages of kv-by-head/float32/"):
        build(model_dir, 4, backend="latent_reference")
    # As on a GPU, where other backends come first.
    paths = {"own": f"{__name__}:{OwnAttention.__name__}", "latent_reference": LATENT_PATH}
    table: Choices[AttentionBackend] = Choices("tandem.engine.attention.base:AttentionBackend", paths)
    monkeypatch.setattr(choice, "ATTENTION_BACKENDS", table)
    assert type(build(latents, 4, dtype="bfloat16")._attention) is LatentReferenceAttention
    # No faster backend for these pages is passed over.
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]
    table = Choices("tandem.engine.attention.base:AttentionBackend", {"own": paths["own"]})
    monkeypatch.setattr(choice, "ATTENTION_BACKENDS", table)
    with pytest.raises(ValueError, match=r"^no attention backend computes this model: OwnAttention reads keys"):
        build(latents, 4)


def write_latent_model(directory: Path) -> str:
    sizes = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "q_lora_rank": None}
    raw = {**TINY_LLAMA, **TINY_EXPERTS, **sizes, "architectures": ["DeepseekV2ForCausalLM"], "num_key_value_heads": 2}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw))
    return str(directory)


def test_ranks_build_parts_of_one_engine(model_dir: str) -> None:
    whole = build(model_dir, 8)

    def of_rank(group: ThreadGroup, _: ThreadCollectives) -> tuple[Engine, str]:
        config = EngineConfig(model_dir, load_format="dummy", num_pages=8, dtype="float32", degree=2)
        engine = build_engine(config, "build-ranks", list[str]().append, group)
        assert engine.model.collectives is not None and engine.model.collectives.ranks == group.ranks
        return engine, engine.model_fingerprint

    (leader, fingerprint), (follower, of_follower) = run_ranks(2, of_rank)
    assert fingerprint == of_follower == whole.model_fingerprint
    assert leader.pool.layout.whole == follower.pool.layout.whole == whole.pool.layout
    assert follower.grammars is None


def test_an_error_of_one_rank_ends_the_build_of_all(model_dir: str) -> None:
    def of_rank(group: ThreadGroup, _: ThreadCollectives) -> None:
        num_pages = 8 + group.ranks.rank
        config = EngineConfig(model_dir, load_format="dummy", num_pages=num_pages, dtype="float32", degree=2)
        with pytest.raises(ValueError, match=r"^ranks disagree about the number of pages: 8 on rank 0, 9 on rank 1$"):
            build_engine(config, f"build-errors-{num_pages}", list[str]().append, group)

    run_ranks(2, of_rank)


@pytest.mark.parametrize("rank_with_error", [None, 1])
def test_the_least_pages_of_all_ranks_count_and_every_rank_hears_of_too_few(rank_with_error: int | None) -> None:
    def of_rank(group: ThreadGroup, _: ThreadCollectives) -> str:
        def choose() -> int:
            if group.ranks.rank == rank_with_error:
                raise ValueError("too little memory")
            return 100 - group.ranks.rank

        try:
            return str(agreed_num_pages(group, choose))
        except ValueError as error:
            return str(error)

    expected = "99" if rank_with_error is None else "rank 1: too little memory"
    assert run_ranks(2, of_rank) == [expected] * 2
