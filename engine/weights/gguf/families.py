"""Supported GGUF architectures, their tensors' names, and their keys of config.json.

GGUF's names are those of the gguf package; defaults of absent keys are llama.cpp's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class TensorSpec(NamedTuple):
    """
    Attributes:
        name: of the checkpoint's tensor, below the model or below its layer; ``{}``: of each expert's.
        shape: names of sizes, columns first, as GGUF has them.
    """

    name: str
    shape: tuple[str, ...]

    @property
    def is_stacked(self) -> bool:
        return "{}" in self.name


TensorSpecs = Mapping[str, TensorSpec]


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """
    Attributes:
        count: key of config.json for the number of experts.
        size: key for an expert's size; "": it is intermediate_size.
        shared_size: key for the shared expert's size; "": there is none.
        normalize: key that says whether the chosen experts' weights are divided by their sum; "": they always are.
        normalizes: value of this key if the file does not say.
    """

    count: str
    size: str = ""
    shared_size: str = ""
    normalize: str = ""
    normalizes: bool = True


@dataclass(frozen=True, slots=True)
class Family:
    """
    Attributes:
        architecture, model_type: of config.json.
        tensors: of each layer, by their names below ``blk.N.``.
        fixed: keys of config.json that always have this value.
        is_interleaved: True if the halves of a head alternate in the rows of queries and keys.
        has_rope_factors: True if the file may hold one factor per rotary frequency.
        experts: None: all layers are dense.
    """

    architecture: str
    model_type: str
    tensors: TensorSpecs
    fixed: Mapping[str, Any] = field(default_factory=dict)
    is_interleaved: bool = False
    has_rope_factors: bool = False
    experts: ExpertKeys | None = None


OUTPUT = "output.weight"
GLOBAL_TENSORS: TensorSpecs = {
    "token_embd.weight": TensorSpec("model.embed_tokens.weight", ("hidden", "vocabulary")),
    "output_norm.weight": TensorSpec("model.norm.weight", ("hidden",)),
    OUTPUT: TensorSpec("lm_head.weight", ("hidden", "vocabulary")),
}
_ATTENTION: TensorSpecs = {
    "attn_norm.weight": TensorSpec("input_layernorm.weight", ("hidden",)),
    "attn_q.weight": TensorSpec("self_attn.q_proj.weight", ("hidden", "query")),
    "attn_k.weight": TensorSpec("self_attn.k_proj.weight", ("hidden", "key")),
    "attn_v.weight": TensorSpec("self_attn.v_proj.weight", ("hidden", "key")),
    "attn_output.weight": TensorSpec("self_attn.o_proj.weight", ("query", "hidden")),
    "ffn_norm.weight": TensorSpec("post_attention_layernorm.weight", ("hidden",)),
}
_QKV_BIASES: TensorSpecs = {
    "attn_q.bias": TensorSpec("self_attn.q_proj.bias", ("query",)),
    "attn_k.bias": TensorSpec("self_attn.k_proj.bias", ("key",)),
    "attn_v.bias": TensorSpec("self_attn.v_proj.bias", ("key",)),
}
_HEAD_NORMS: TensorSpecs = {
    "attn_q_norm.weight": TensorSpec("self_attn.q_norm.weight", ("head",)),
    "attn_k_norm.weight": TensorSpec("self_attn.k_norm.weight", ("head",)),
}
_WHOLE_NORMS: TensorSpecs = {
    "attn_q_norm.weight": TensorSpec("self_attn.q_norm.weight", ("query",)),
    "attn_k_norm.weight": TensorSpec("self_attn.k_norm.weight", ("key",)),
}
_DENSE: TensorSpecs = {
    "ffn_gate.weight": TensorSpec("mlp.gate_proj.weight", ("hidden", "inner")),
    "ffn_up.weight": TensorSpec("mlp.up_proj.weight", ("hidden", "inner")),
    "ffn_down.weight": TensorSpec("mlp.down_proj.weight", ("inner", "hidden")),
}
_SHARED_EXPERT: TensorSpecs = {
    "ffn_gate_inp_shexp.weight": TensorSpec("mlp.shared_expert_gate.weight", ("hidden", "one")),
    "ffn_gate_shexp.weight": TensorSpec("mlp.shared_expert.gate_proj.weight", ("hidden", "shared")),
    "ffn_up_shexp.weight": TensorSpec("mlp.shared_expert.up_proj.weight", ("hidden", "shared")),
    "ffn_down_shexp.weight": TensorSpec("mlp.shared_expert.down_proj.weight", ("shared", "hidden")),
}


def _experts(mlp: str, gate: str, up: str, down: str) -> TensorSpecs:
    return {
        "ffn_gate_inp.weight": TensorSpec(f"{mlp}.gate.weight", ("hidden", "experts")),
        "ffn_gate_exps.weight": TensorSpec(f"{mlp}.experts.{{}}.{gate}.weight", ("hidden", "expert", "experts")),
        "ffn_up_exps.weight": TensorSpec(f"{mlp}.experts.{{}}.{up}.weight", ("hidden", "expert", "experts")),
        "ffn_down_exps.weight": TensorSpec(f"{mlp}.experts.{{}}.{down}.weight", ("expert", "hidden", "experts")),
    }


_EXPERTS = _experts("mlp", "gate_proj", "up_proj", "down_proj")
_MIXTRAL_EXPERTS = _experts("block_sparse_moe", "w1", "w3", "w2")

# By architecture, and whether it has experts: Mixtral's is llama.
FAMILIES: Mapping[tuple[str, bool], Family] = {
    ("llama", False): Family(
        "LlamaForCausalLM",
        "llama",
        {**_ATTENTION, **_DENSE},
        fixed={"attention_bias": False, "mlp_bias": False},
        is_interleaved=True,
        has_rope_factors=True,
    ),
    ("llama", True): Family(
        "MixtralForCausalLM",
        "mixtral",
        {**_ATTENTION, **_MIXTRAL_EXPERTS},
        is_interleaved=True,
        has_rope_factors=True,
        experts=ExpertKeys("num_local_experts"),
    ),
    ("qwen2", False): Family("Qwen2ForCausalLM", "qwen2", {**_ATTENTION, **_QKV_BIASES, **_DENSE}),
    ("qwen3", False): Family(
        "Qwen3ForCausalLM", "qwen3", {**_ATTENTION, **_HEAD_NORMS, **_DENSE}, fixed={"attention_bias": False}
    ),
    ("qwen2moe", True): Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {**_ATTENTION, **_QKV_BIASES, **_EXPERTS, **_SHARED_EXPERT},
        fixed={"qkv_bias": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        experts=ExpertKeys(
            "num_experts",
            size="moe_intermediate_size",
            shared_size="shared_expert_intermediate_size",
            normalize="norm_topk_prob",
            normalizes=False,
        ),
    ),
    ("qwen3moe", True): Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {**_ATTENTION, **_HEAD_NORMS, **_EXPERTS},
        fixed={"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        experts=ExpertKeys("num_experts", size="moe_intermediate_size", normalize="norm_topk_prob"),
    ),
    ("olmoe", True): Family(
        "OlmoeForCausalLM",
        "olmoe",
        {**_ATTENTION, **_WHOLE_NORMS, **_EXPERTS},
        fixed={"attention_bias": False},
        experts=ExpertKeys("num_experts", normalize="norm_topk_prob", normalizes=False),
    ),
}
