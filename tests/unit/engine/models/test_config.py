import json
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.models.config import ModelConfig
from tandem.engine.models.families.table import ARCHITECTURES
from tandem.engine.models.rope import Llama3RopeScaling

# Published config.json files, without keys that do not affect the computation.
LLAMA_3_1_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
MISTRAL_7B_V0_3: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32768,
}
QWEN2_5_0_5B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED = (LLAMA_3_1_8B, MISTRAL_7B_V0_3, QWEN2_5_0_5B, QWEN3_0_6B)
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
REQUIRED = (*SIZES, "rms_norm_eps", "max_position_embeddings")


def read_config(tmp_path: Path, published: dict[str, Any], *absent: str, **changes: Any) -> ModelConfig:
    raw = {key: value for key, value in {**published, **changes}.items() if key not in absent}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return ModelConfig.from_dir(tmp_path)


def test_reads_llama_in_both_forms(tmp_path: Path) -> None:
    config = read_config(tmp_path, LLAMA_3_1_8B)
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 8192),
    )
    new = {"rope_theta": 500000.0, **LLAMA_3_1_8B["rope_scaling"]}
    assert read_config(tmp_path, LLAMA_3_1_8B, "rope_theta", "rope_scaling", rope_parameters=new) == config
    assert read_config(tmp_path, LLAMA_3_1_8B, rope_parameters=new) == config


@pytest.mark.parametrize("changes", [{}, {"head_dim": None}, {"sliding_window": 32768, "use_sliding_window": True}])
def test_reads_mistral(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert read_config(tmp_path, MISTRAL_7B_V0_3, **changes) == ModelConfig(
        architecture="MistralForCausalLM",
        vocab_size=32768,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=1000000.0,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    )


# A window as long as the context has no effect, so it is accepted.
@pytest.mark.parametrize("changes", [{}, {"use_sliding_window": True}, {"layer_types": ["full_attention"] * 24}])
def test_reads_qwen2(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert read_config(tmp_path, QWEN2_5_0_5B, **changes) == ModelConfig(
        architecture="Qwen2ForCausalLM",
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_q_heads=14,
        num_kv_heads=2,
        head_dim=64,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        qkv_bias=True,
    )


@pytest.mark.parametrize("bias", [False, True])
def test_reads_qwen3(tmp_path: Path, bias: bool) -> None:
    assert read_config(tmp_path, QWEN3_0_6B, attention_bias=bias) == ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_q_heads=16,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1000000,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )


def test_defaults(tmp_path: Path) -> None:
    absent = ("rope_scaling", "rope_theta", "num_key_value_heads", "tie_word_embeddings", "attention_bias", "mlp_bias")
    window = {"sliding_window": 64, "use_sliding_window": False}
    config = read_config(tmp_path, LLAMA_3_1_8B, *absent, rope_interleaved=False, **window)
    assert (config.rope_theta, config.rope_scaling) == (10000.0, None)
    assert (config.num_kv_heads, config.tie_word_embeddings) == (32, False)
    assert not (config.qkv_bias or config.o_bias or config.mlp_bias)


# Defaults of Hugging Face's configuration classes.
@pytest.mark.parametrize(
    ("published", "num_kv_heads", "head_dim"),
    [(MISTRAL_7B_V0_3, 8, 128), ({**QWEN2_5_0_5B, "num_attention_heads": 32}, 32, 28), (QWEN3_0_6B, 32, 128)],
)
def test_defaults_by_architecture(tmp_path: Path, published: dict[str, Any], num_kv_heads: int, head_dim: int) -> None:
    absent = ("num_key_value_heads", "head_dim", "use_sliding_window")
    config = read_config(tmp_path, published, *absent, num_attention_heads=32)
    assert (config.num_kv_heads, config.head_dim) == (num_kv_heads, head_dim)


SUPPORTED = ", ".join(ARCHITECTURES)
LLAMA3_ROPE = LLAMA_3_1_8B["rope_scaling"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, f"'GPT2LMHeadModel' is not supported; supported: {SUPPORTED}$"),
        ({"architectures": ["Gemma3ForCausalLM"]}, f"'Gemma3ForCausalLM' is not supported; supported: {SUPPORTED}"),
        ({"architectures": [None]}, "architecture None is not supported"),
        ({"architectures": None}, "architectures must name one architecture"),
        ({"architectures": ["LlamaForCausalLM", "Qwen2ForCausalLM"]}, "architectures must name one architecture"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: quant_method 'awq' is not supported"),
        ({"compression_config": {}}, "config_groups must be an object, not None"),
        ({"num_experts": 128}, "num_experts is 128, but this architecture has no experts"),
        ({"num_local_experts": 8}, "num_local_experts is 8"),
        ({"rope_scaling": {"factor": 2.0}}, "rope type 'default' with factor"),
        ({"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": None}}, "low_freq_factor is missing"),
        ({"rope_scaling": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}, "high_freq_factor must be greater"),
        ({"rope_scaling": {"rope_type": ["llama3"]}}, r"rope type \['llama3'\] is not supported"),
        ({"rope_scaling": "llama3"}, "rope_scaling must be an object"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}, "rope_parameters contradicts"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"rope_theta": 0}, "rope_theta must be a number greater than 0"),
        ({"sliding_window": 4096}, "sliding_window 4096 is in effect"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1, not 0"),
        ({"intermediate_size": 14336.0}, "intermediate_size must be a whole number"),
        ({"num_attention_heads": 33}, "hidden_size 4096 is not a multiple of 33"),
        ({"num_attention_heads": True}, "num_attention_heads must be a whole number"),
        ({"num_key_value_heads": 5}, "num_q_heads 32 is not a multiple of num_kv_heads 5"),
        ({"head_dim": 63}, "head_dim 63 is odd"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ({"attention_bias": "no"}, "qkv_bias must be true or false"),
    ],
)
def test_refuses(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read_config(tmp_path, LLAMA_3_1_8B, **changes)
    assert str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize(
    ("published", "changes", "message"),
    [
        (MISTRAL_7B_V0_3, {"sliding_window": 32767}, "sliding_window 32767 is in effect, .* below max_pos.* 32768"),
        # Hugging Face's Mistral ignores this key.
        (MISTRAL_7B_V0_3, {"sliding_window": 4096, "use_sliding_window": False}, "sliding_window 4096 is in effect"),
        (MISTRAL_7B_V0_3, {"sliding_window": "4096"}, "sliding_window must be a whole number"),
        (QWEN2_5_0_5B, {"sliding_window": 4096, "use_sliding_window": True}, "sliding_window 4096 is in effect"),
        (QWEN2_5_0_5B, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
        (QWEN3_0_6B, {"sliding_window": 4096, "use_sliding_window": True}, "sliding_window 4096 is in effect"),
        (QWEN3_0_6B, {"layer_types": ["sliding_attention"]}, "layer_types has sliding_attention; supported: full_"),
        (QWEN3_0_6B, {"layer_types": "full_attention"}, "layer_types must be a list"),
    ],
)
def test_refuses_sliding_windows(
    tmp_path: Path, published: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path, published, **changes)


def test_refuses_the_window_that_mistral_has_by_default(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sliding_window 4096 is in effect"):
        read_config(tmp_path, MISTRAL_7B_V0_3, "sliding_window")


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "longrope", "mrope", "su"])
@pytest.mark.parametrize("published", PUBLISHED)
def test_refuses_other_ropes(tmp_path: Path, published: dict[str, Any], rope_type: str) -> None:
    message = f"rope type '{rope_type}' is not supported; supported: default, llama3, yarn"
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path, published, rope_scaling={"type": rope_type, "factor": 2.0})
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path, published, "rope_theta", rope_parameters={"rope_type": rope_type, "factor": 2.0})


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("published", PUBLISHED)
def test_refuses_missing_keys(tmp_path: Path, published: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} is missing"):
        read_config(tmp_path, published, key)


def test_refuses_unreadable_configs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json: cannot be read: No such file"):
        ModelConfig.from_dir(tmp_path)
    for text, message in (("{", "is not JSON"), ("[]", "must be an object")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            ModelConfig.from_dir(tmp_path)


WRONG: tuple[Any, ...] = (
    *(True, False, 0, -1, 1.5, float("nan"), float("inf"), 2**31, 2**70, "", "x", "x" * 10_000),
    *([], [1], [[1]], ["x"] * 1000, {}, {"a": 1}),
)
KEYS = (
    *SIZES,
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings"),
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act", "architectures", "layer_types"),
    *("sliding_window", "rope_scaling", "quantization_config", "num_experts"),
)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published["architectures"][0])
def test_any_value_is_taken_or_refused_in_one_line(tmp_path: Path, published: dict[str, Any], key: str) -> None:
    num_refused = 0
    for value in WRONG:
        try:
            config = read_config(tmp_path, published, **{key: value})
        except ValueError as error:
            num_refused += 1
            assert "\n" not in str(error) and len(str(error)) < 500 + len(str(tmp_path))
        else:
            assert config.num_layers <= 1024 and config.max_position_embeddings < 2**31
    # Some architectures ignore some keys.
    assert num_refused >= 5 or key not in REQUIRED


def test_refuses_more_layers_than_any_model_has(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_hidden_layers must be at most 1024, not 100000"):
        read_config(tmp_path, LLAMA_3_1_8B, num_hidden_layers=100_000)
    with pytest.raises(ValueError, match="max_position_embeddings must be at most 2147483647"):
        read_config(tmp_path, LLAMA_3_1_8B, max_position_embeddings=2**40)
