"""Shapes of the measured models, so that tests need no checkpoints."""

from tandem.engine.models.config import ModelConfig
from tandem.engine.models.experts import ExpertNames, ExpertsConfig, Routing

LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    max_position_embeddings=131_072,
    tie_word_embeddings=False,
)
QWEN_0_6B = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_q_heads=16,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1_000_000.0,
    max_position_embeddings=40_960,
    tie_word_embeddings=True,
    qk_norm=True,
)
QWEN3_30B_A3B = ModelConfig(
    architecture="Qwen3MoeForCausalLM",
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_q_heads=32,
    num_kv_heads=4,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1_000_000.0,
    max_position_embeddings=40_960,
    tie_word_embeddings=False,
    qk_norm=True,
    experts=ExpertsConfig(num_experts=128, intermediate_size=768, routing=Routing("softmax", 8, normalize=True)),
)
MIXTRAL_8X7B = ModelConfig(
    architecture="MixtralForCausalLM",
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=1_000_000.0,
    max_position_embeddings=32_768,
    tie_word_embeddings=False,
    experts=ExpertsConfig(
        num_experts=8,
        intermediate_size=14_336,
        routing=Routing("softmax", 2, normalize=True),
        names=ExpertNames(mlp="block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
)
