"""Families of mixtures of experts: published configurations, defaults, refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tandem.engine.models.config import ModelConfig
from tandem.engine.models.experts import ExpertNames, ExpertsConfig, Routing
from tandem.engine.models.latent import IndexerConfig, LatentConfig
from tests.unit.engine.models.test_config import WRONG

# Published config.json files, without keys that do not affect the computation.
COMMON = {"attention_bias": False, "hidden_act": "silu", "rope_scaling": None, "tie_word_embeddings": False}
MIXTRAL_8X7B: dict[str, Any] = COMMON | {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 32000,
}
OLMOE_1B_7B: dict[str, Any] = COMMON | {
    "architectures": ["OlmoeForCausalLM"],
    "clip_qkv": None,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "vocab_size": 50304,
}
QWEN1_5_MOE: dict[str, Any] = COMMON | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_30B_A3B: dict[str, Any] = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
DOTS_LLM1: dict[str, Any] = COMMON | {
    "architectures": ["Dots1ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 32768,
    "max_window_layers": 62,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 62,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
    "topk_group": 1,
    "vocab_size": 152064,
}
# Biases, and the number of keys and values, may also be absent.
LATENT = COMMON | {
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "qk_rope_head_dim": 64,
    "rope_theta": 10000,
    "scoring_func": "softmax",
    "v_head_dim": 128,
}
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
DEEPSEEK_V2_LITE: dict[str, Any] = LATENT | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
DEEPSEEK_V2: dict[str, Any] = DEEPSEEK_V2_LITE | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
DEEPSEEK_V3: dict[str, Any] = LATENT | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
DEEPSEEK_V32: dict[str, Any] = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}
GLM_4_7_FLASH: dict[str, Any] = COMMON | {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
_SHARED = ExpertNames(shared="shared_experts")
_V3_EXPERTS = ExpertsConfig(
    256,
    2048,
    Routing("sigmoid", 8, True, 2.5, has_bias=True, num_groups=8, num_groups_used=4),
    shared_intermediate_size=2048,
    dense_layers=(0, 1, 2),
    names=_SHARED,
    count_key="n_routed_experts",
)
PUBLISHED: dict[str, tuple[dict[str, Any], ExpertsConfig]] = {
    "mixtral": (
        MIXTRAL_8X7B,
        ExpertsConfig(
            8,
            14336,
            Routing("softmax", 2, normalize=True),
            names=ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
            count_key="num_local_experts",
            size_key="intermediate_size",
        ),
    ),
    "olmoe": (OLMOE_1B_7B, ExpertsConfig(64, 1024, Routing("softmax", 8), size_key="intermediate_size")),
    "qwen2_moe": (
        QWEN1_5_MOE,
        ExpertsConfig(60, 1408, Routing("softmax", 4), shared_intermediate_size=5632, shared_gate=True),
    ),
    "qwen3_moe": (QWEN3_30B_A3B, ExpertsConfig(128, 768, Routing("softmax", 8, normalize=True))),
    "dots1": (
        DOTS_LLM1,
        ExpertsConfig(
            128,
            1408,
            Routing("sigmoid", 6, normalize=True, scaling=2.5, has_bias=True),
            shared_intermediate_size=2816,
            dense_layers=(0,),
            names=ExpertNames(shared="shared_experts"),
            count_key="n_routed_experts",
        ),
    ),
    "deepseek_v2": (
        DEEPSEEK_V2,
        ExpertsConfig(
            160,
            1536,
            Routing("softmax", 6, scaling=16.0, num_groups=8, num_groups_used=3, num_ranked=1, float32_logits=True),
            shared_intermediate_size=3072,
            dense_layers=(0,),
            names=_SHARED,
            count_key="n_routed_experts",
        ),
    ),
    "deepseek_v3": (DEEPSEEK_V3, _V3_EXPERTS),
    "deepseek_v32": (DEEPSEEK_V32, _V3_EXPERTS),
    "glm4_moe_lite": (
        GLM_4_7_FLASH,
        ExpertsConfig(
            64,
            1536,
            Routing("sigmoid", 4, True, 1.8, has_bias=True),
            shared_intermediate_size=1536,
            dense_layers=(0,),
            names=_SHARED,
            count_key="n_routed_experts",
        ),
    ),
}
_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_OF_DEEPSEEK = ("n_routed_experts", "moe_intermediate_size", "norm_topk_prob", "n_shared_experts", "n_group", *_SIZES)
# Keys that only families with experts have, besides num_experts_per_tok.
KEYS = {
    "mixtral": ("num_local_experts", "intermediate_size"),
    "olmoe": ("num_experts", "intermediate_size", "norm_topk_prob", "clip_qkv"),
    "qwen2_moe": (
        *("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob"),
        *("decoder_sparse_step", "mlp_only_layers", "qkv_bias", "num_local_experts"),
    ),
    "qwen3_moe": (
        *("num_experts", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"),
        "num_local_experts",
    ),
    "dots1": (
        *("n_routed_experts", "moe_intermediate_size", "norm_topk_prob", "n_shared_experts", "routed_scaling_factor"),
        *("first_k_dense_replace", "n_group", "topk_group", "moe_layer_freq"),
    ),
    "deepseek_v2": (*_OF_DEEPSEEK, "routed_scaling_factor", "first_k_dense_replace", "topk_group", "topk_method"),
    "deepseek_v3": (*_OF_DEEPSEEK, "routed_scaling_factor", "first_k_dense_replace", "topk_group"),
    "deepseek_v32": (
        *(*_OF_DEEPSEEK, "routed_scaling_factor", "first_k_dense_replace", "topk_group", "mlp_layer_types"),
        *("index_n_heads", "index_head_dim", "index_topk"),
    ),
    "glm4_moe_lite": (*_OF_DEEPSEEK, "routed_scaling_factor", "topk_group", "mlp_layer_types"),
}


def read(tmp_path: Path, family: str, *absent: str, **changes: Any) -> ModelConfig:
    raw = {key: value for key, value in {**PUBLISHED[family][0], **changes}.items() if key not in absent}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return ModelConfig.from_dir(tmp_path)


def experts_of(config: ModelConfig) -> ExpertsConfig:
    assert config.experts is not None
    return config.experts


@pytest.mark.parametrize("family", PUBLISHED)
def test_reads_published_configurations(tmp_path: Path, family: str) -> None:
    config = read(tmp_path, family)
    expected = PUBLISHED[family][1]
    assert config.experts == expected and experts_of(config).count_key == expected.count_key
    assert (config.qk_norm, config.whole_qk_norm) == (family in ("qwen3_moe", "dots1"), family == "olmoe")
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (family == "qwen2_moe", False, False)
    sparse = [config.is_sparse(layer) for layer in range(config.num_layers)]
    assert sparse == [layer not in experts_of(config).dense_layers for layer in range(config.num_layers)]


@pytest.mark.parametrize("family", PUBLISHED)
def test_defaults_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    changes = {"num_hidden_layers": 4, "rms_norm_eps": 1e-6}
    if family == "dots1":
        changes |= {"n_routed_experts": 16, "num_experts_per_tok": 4}
    if family == "deepseek_v2":
        changes |= {"num_experts_per_tok": 4}
    theirs: dict[str, Any] = AutoConfig.for_model(family, **changes).to_dict()
    theirs["architectures"] = PUBLISHED[family][0]["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    expected = ModelConfig.from_dir(tmp_path)
    # Required, because a wrong default would only be noticed when weights are loaded.
    needed: tuple[str, ...] = (
        *("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "rms_norm_eps", "max_position_embeddings"),
        *("num_experts", "num_local_experts", "n_routed_experts"),
    )
    if family in ("dots1", "deepseek_v2"):
        needed = (*needed, "num_experts_per_tok")
    (tmp_path / "config.json").write_text(json.dumps({key: theirs[key] for key in needed if key in theirs}))
    assert ModelConfig.from_dir(tmp_path) == expected


def test_some_layers_are_dense(tmp_path: Path) -> None:
    config = read(tmp_path, "qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[1, 0])
    assert experts_of(config).dense_layers == (0, 1, 2, 4)
    assert [config.is_sparse(layer) for layer in range(6)] == [False, False, False, True, False, True]
    assert experts_of(read(tmp_path, "dots1", first_k_dense_replace=3)).dense_layers == (0, 1, 2)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {"num_experts": 0}),
        ("qwen2_moe", {"num_experts": 0}),
        ("qwen3_moe", {"decoder_sparse_step": 100}),
        ("qwen2_moe", {"mlp_only_layers": list(range(24))}),
        ("dots1", {"first_k_dense_replace": 62}),
    ],
)
def test_all_layers_may_be_dense(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    config = read(tmp_path, family, **changes)
    assert config.experts is None and not config.is_sparse(0)


def test_layers_are_dense_as_listed(tmp_path: Path) -> None:
    types = ["sparse", "dense", "sparse", "dense"]
    config = read(tmp_path, "glm4_moe_lite", num_hidden_layers=4, mlp_layer_types=types)
    assert experts_of(config).dense_layers == (1, 3)
    assert experts_of(read(tmp_path, "glm4_moe_lite", num_hidden_layers=4)).dense_layers == (0,)


def test_sizes_of_latents(tmp_path: Path) -> None:
    lite = tmp_path / "lite"
    lite.mkdir()
    (lite / "config.json").write_text(json.dumps(DEEPSEEK_V2_LITE))
    v2_lite, v2 = ModelConfig.from_dir(lite), read(tmp_path, "deepseek_v2")
    assert v2_lite.latent == LatentConfig(q_rank=0, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    assert (v2_lite.head_dim, v2_lite.num_kv_heads, v2_lite.rope_dim, v2_lite.value_dim) == (192, 16, 64, 128)
    assert experts_of(v2_lite).routing == Routing("softmax", 6, num_ranked=1, float32_logits=True)
    assert v2.latent == replace(v2_lite.latent, q_rank=1536)
    glm = read(tmp_path, "glm4_moe_lite")
    assert glm.latent == LatentConfig(q_rank=768, kv_rank=512, nope_dim=192, rope_dim=64, value_dim=256)
    # Groups have no effect on a greedy choice.
    assert experts_of(read(tmp_path, "deepseek_v2", topk_method="greedy", n_group=7)).routing.num_groups == 1


def test_tokens_that_queries_choose(tmp_path: Path) -> None:
    config = read(tmp_path, "deepseek_v32")
    assert config.indexer == IndexerConfig(num_heads=64, head_dim=128, top_k=2048)
    assert config.latent == read(tmp_path, "deepseek_v3").latent and read(tmp_path, "deepseek_v3").indexer is None
    indexed = ["indexed_attention"] * 61
    assert read(tmp_path, "deepseek_v32", layer_types=indexed) == config
    listed = read(tmp_path, "deepseek_v32", mlp_layer_types=["sparse", *["dense"] * 59, "sparse"])
    assert experts_of(listed).dense_layers == tuple(range(1, 60))


def test_layers_that_predict_further_tokens_are_known(tmp_path: Path) -> None:
    assert read(tmp_path, "deepseek_v2").extra_layers == ()
    assert read(tmp_path, "deepseek_v3").extra_layers == (61,)
    assert read(tmp_path, "deepseek_v3", num_nextn_predict_layers=0).extra_layers == ()
    assert read(tmp_path, "glm4_moe_lite", num_nextn_predict_layers=2).extra_layers == (47, 48)


def test_the_newer_name_of_the_count(tmp_path: Path) -> None:
    # Equal configurations, so that workers with either name exchange pages.
    expected = read(tmp_path, "qwen3_moe")
    newer = read(tmp_path, "qwen3_moe", "num_experts", num_local_experts=128)
    both = read(tmp_path, "qwen3_moe", num_local_experts=128)
    assert newer == both == expected
    assert [experts_of(config).count_key for config in (expected, both, newer)] == [
        *("num_experts", "num_experts", "num_local_experts"),
    ]
    with pytest.raises(ValueError, match=r"num_experts_per_tok 8 is more than num_local_experts 4$"):
        read(tmp_path, "qwen3_moe", "num_experts", num_local_experts=4)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"num_local_experts": None}, "num_local_experts is missing"),
        ("mixtral", {"num_local_experts": 1}, "num_experts_per_tok 2 is more than num_local_experts 1"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window 4096 is in effect"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0, which is not supported"),
        ("olmoe", {"clip_qkv": 0}, "clip_qkv is 0, which is not supported"),
        ("olmoe", {"num_experts_per_tok": 65}, "num_experts_per_tok 65 is more than num_experts 64"),
        ("olmoe", {"intermediate_size": 0}, "intermediate_size must be a whole number of at least 1, not 0"),
        ("olmoe", {"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false, not 'yes'"),
        ("qwen2_moe", {"num_experts": None}, "num_experts is missing"),
        ("qwen2_moe", {"num_experts": False}, "num_experts must be a whole number of at least 0, not False"),
        ("qwen2_moe", {"qkv_bias": 1}, "qkv_bias must be true or false, not 1"),
        (
            "qwen2_moe",
            {"shared_expert_intermediate_size": 0},
            "shared_expert_intermediate_size must be a whole number of at least 1, not 0",
        ),
        ("qwen2_moe", {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is missing"),
        ("qwen3_moe", {"num_local_experts": 64}, "num_experts 128 contradicts num_local_experts 64"),
        ("qwen3_moe", {"mlp_only_layers": [3, 48]}, "mlp_only_layers has layer 48, but num_hidden_layers is 48"),
        ("qwen3_moe", {"mlp_only_layers": [-1]}, "mlp_only_layers has layer -1, but num_hidden_layers is 48"),
        ("qwen3_moe", {"mlp_only_layers": [True]}, r"mlp_only_layers must be a list of layers, not \[True\]"),
        ("qwen3_moe", {"mlp_only_layers": 0}, "mlp_only_layers must be a list of layers, not 0"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number of at least 1, not 0"),
        ("qwen3_moe", {"moe_intermediate_size": None}, "moe_intermediate_size must be a whole number"),
        ("dots1", {"n_routed_experts": None}, "n_routed_experts is missing"),
        ("dots1", {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ("dots1", {"n_group": 3}, "n_routed_experts 128 is not a multiple of n_group 3"),
        ("dots1", {"n_group": 128}, "n_group 128 leaves fewer than 2 of n_routed_experts 128 in a group"),
        ("dots1", {"n_group": 4, "topk_group": 5}, "topk_group 5 is more than n_group 4"),
        ("dots1", {"n_group": 32}, "num_experts_per_tok 6 is more than the 4 experts of topk_group 1"),
        ("dots1", {"n_group": None}, "n_group must be a whole number of at least 1, not None"),
        ("dots1", {"first_k_dense_replace": -1}, "first_k_dense_replace must be a whole number of at least 0, not -1"),
        ("dots1", {"routed_scaling_factor": 0}, "routed_scaling_factor must be a number greater than 0, not 0"),
        ("dots1", {"n_shared_experts": 0}, "n_shared_experts must be a whole number of at least 1, not 0"),
        ("dots1", {"n_shared_experts": 2**30}, "n_shared_experts must be at most 1525201, not 1073741824"),
        ("dots1", {"moe_layer_freq": 2}, "moe_layer_freq is 2, which is not supported"),
        ("dots1", {"sliding_window": 4096, "max_window_layers": 10}, "sliding_window 4096 is in effect"),
        ("dots1", {"sliding_window": 4096, "num_hidden_layers": "x"}, "num_hidden_layers must be a whole number"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method must be greedy or group_limited_greedy, not 'noaux"),
        ("deepseek_v2", {"n_group": None}, "n_group is missing"),
        ("deepseek_v2", {"n_group": 7}, "n_routed_experts 160 is not a multiple of n_group 7"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True, which is not supported"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', which is not supported"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias is True, which is not supported"),
        ("deepseek_v2", {"num_attention_heads": None}, "num_attention_heads is missing"),
        ("deepseek_v3", {"num_key_value_heads": 8}, "num_key_value_heads 8 differs from num_attention_heads 128, but"),
        ("deepseek_v3", {"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd, but the rotary embedding rotates pairs"),
        ("deepseek_v3", {"q_lora_rank": 0}, "q_lora_rank must be a whole number of at least 1, not 0"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank must be a whole number of at least 1, not None"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias is True, which is not supported"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False, which is not supported"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy', which is not supported"),
        ("deepseek_v3", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must be a whole number of at"),
        (
            "deepseek_v3",
            {"layer_types": ["indexed_attention"] * 61},
            "layer_types has indexed_attention; supported: ",
        ),
        (
            "deepseek_v32",
            {"layer_types": ["full_attention"] * 61},
            "layer_types has full_attention; supported: ind",
        ),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank is missing, but index queries are projected from"),
        ("deepseek_v32", {"index_topk": 0}, "index_topk must be a whole number of at least 1, not 0"),
        ("deepseek_v32", {"index_n_heads": None}, "index_n_heads must be a whole number of at least 1, not None"),
        (
            "deepseek_v32",
            {"index_head_dim": 32},
            "index_head_dim 32 is less than qk_rope_head_dim 64",
        ),
        ("glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace is 2, which is not supported"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse"] * 46}, "mlp_layer_types must list dense or sparse for 47 lay"),
        ("glm4_moe_lite", {"mlp_layer_types": ["odd"] * 47}, "mlp_layer_types must list dense or sparse for 47 lay"),
    ],
)
def test_refuses(tmp_path: Path, family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{tmp_path}/config.json: {message}"):
        read(tmp_path, family, **changes)


def test_windows_from_a_layer_beyond_the_last_have_no_effect(tmp_path: Path) -> None:
    assert read(tmp_path, "dots1", sliding_window=4096) == read(tmp_path, "dots1")


@pytest.mark.parametrize(("family", "key"), [(f, k) for f in KEYS for k in (*KEYS[f], "num_experts_per_tok")])
def test_any_value_is_taken_or_refused_in_one_line(tmp_path: Path, family: str, key: str) -> None:
    refused = []
    for value in (*WRONG, None):
        try:
            config = read(tmp_path, family, **{key: value})
        except ValueError as error:
            refused.append(value)
            assert "\n" not in str(error) and len(str(error)) < 500 + len(str(tmp_path))
            assert key in str(error) or "num_experts" in str(error)
        else:
            assert config.experts is None or 1 <= config.experts.num_experts <= 4096
    # Texts and objects are no value of any key.
    assert all(value in refused for value in ("x", {"a": 1}, ["x"] * 1000))
