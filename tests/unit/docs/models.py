"""Table of supported models in docs/models.md; `python -m tests.unit.docs.models` writes it there."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tandem.engine.models.families.base import Architecture
from tandem.engine.models.families.table import ARCHITECTURES
from tests.fakes.model_config import TINY_EXPERTS, TINY_LLAMA

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/models.md"
BEGIN = "<!-- models: python -m tests.unit.docs.models -->\n"
END = "<!-- end of models -->"
# Settings with which a family has all that it may have.
_ALL_KINDS = {
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "topk_method": "group_limited_greedy",
    "n_group": 2,
    "topk_group": 1,
}
HEAD = "| family | `architectures` | attention | MLP | GGUF | refused besides |\n|---|---|---|---|---|---|\n"
FAMILIES = {
    "LlamaForCausalLM": "Llama 2, 3",
    "MistralForCausalLM": "Mistral",
    "Qwen2ForCausalLM": "Qwen2, Qwen2.5",
    "Qwen3ForCausalLM": "Qwen3",
    "MixtralForCausalLM": "Mixtral",
    "OlmoeForCausalLM": "OLMoE",
    "Qwen2MoeForCausalLM": "Qwen1.5-MoE, Qwen2-MoE",
    "Qwen3MoeForCausalLM": "Qwen3-MoE",
    "Dots1ForCausalLM": "dots.llm1",
    "DeepseekV2ForCausalLM": "DeepSeek-V2, V2-Lite",
    "DeepseekV3ForCausalLM": "DeepSeek-V3, R1",
    "DeepseekV32ForCausalLM": "DeepSeek-V3.2",
    "Glm4MoeLiteForCausalLM": "GLM-4.7-Flash",
}


def rows() -> Iterator[str]:
    for name, architecture in ARCHITECTURES.items():
        gguf = "yes" if name in written_by_gguf() else "no"
        cells = (FAMILIES[name], f"`{name}`", _attention(architecture), _mlp(architecture), gguf)
        yield f"| {' | '.join(cells)} | {_refused(architecture)} |\n"


@cache
def written_by_gguf() -> frozenset[str]:
    """Return the architectures of converted GGUF files: the converter names them in its source."""
    files = [*ROOT.glob("engine/weights/gguf*.py"), *ROOT.glob("engine/weights/gguf/*.py")]
    return frozenset(name for file in files for name in re.findall(r'"(\w+ForCausalLM)"', file.read_text()))


def _attention(architecture: Architecture) -> str:
    parts = [] if architecture.latent is None else ["latents" if architecture.indexer is None else "chosen latents"]
    if architecture.qkv_bias:
        given = architecture.qkv_bias
        parts.append(f"biases if `{given}`" if isinstance(given, str) else "biases of queries, keys and values")
    if architecture.qk_norm:
        parts.append("norms of each head")
    if architecture.whole_qk_norm:
        parts.append("norms across heads")
    return ", ".join(parts) or "–"


def _mlp(architecture: Architecture) -> str:
    if architecture.experts is None:
        return "dense"
    raw = {**architecture.defaults, **TINY_LLAMA, **TINY_EXPERTS, **_ALL_KINDS}
    experts = architecture.experts(raw, 2)
    assert experts is not None
    routing = experts.routing
    bias, groups = " with a bias" if routing.has_bias else "", ", in groups" if routing.num_groups > 1 else ""
    parts = [f"experts by {routing.scoring}{bias}{groups}"]
    if experts.shared_intermediate_size:
        parts.append(f"a shared one{' with a gate' if experts.shared_gate else ''}")
    return ", ".join(parts)


def _refused(architecture: Architecture) -> str:
    wanted = (
        f"`{key}`" if value is None else f"`{key}` other than {value}" for key, value in architecture.neutral.items()
    )
    return ", ".join(wanted) or "–"


def written(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    assert rest, "the page has no mark"
    return f"{before}{BEGIN}\n{HEAD}{''.join(rows())}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
