"""Supported architectures by their class name in config.json. Imports no torch."""

from collections.abc import Mapping

from tandem.engine.models.families.base import Architecture
from tandem.engine.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32, GLM4_MOE_LITE
from tandem.engine.models.families.dense import LLAMA, MISTRAL, QWEN2, QWEN3
from tandem.engine.models.families.dots1 import DOTS1
from tandem.engine.models.families.mixtral import MIXTRAL
from tandem.engine.models.families.olmoe import OLMOE
from tandem.engine.models.families.qwen_moe import QWEN2_MOE, QWEN3_MOE

# Never an import path: config.json comes with the model and must not select code to import.
ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "MixtralForCausalLM": MIXTRAL,
    "OlmoeForCausalLM": OLMOE,
    "Qwen2MoeForCausalLM": QWEN2_MOE,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
    "Dots1ForCausalLM": DOTS1,
    "DeepseekV2ForCausalLM": DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "DeepseekV32ForCausalLM": DEEPSEEK_V32,
    "Glm4MoeLiteForCausalLM": GLM4_MOE_LITE,
}
