from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.cluster.conftest import save_tiny_model
from tests.fakes.draft_layers import TOKENS, last_logits, norm, shifted
from tests.fakes.tiny_drafters import EAGLE_VOCAB_SIZE, save_eagle_head


@pytest.mark.parametrize("chunks", [(10,), (3, 1, 6)], ids=["whole", "chunks"])
def test_eagle_head(tmp_path: Path, chunks: tuple[int, ...]) -> None:
    from transformers import AutoModelForCausalLM

    path, head = tmp_path / "tiny", tmp_path / "head"
    save_tiny_model(path)
    save_eagle_head(head, path)
    target = AutoModelForCausalLM.from_pretrained(path).eval()
    w = load_file(head / "model.safetensors")
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        # Inputs of the layers 0, 1 and 1.
        inputs = target.model(ids, output_hidden_states=True).hidden_states
        states = F.linear(torch.cat((inputs[0], inputs[1], inputs[1]), dim=-1)[0], w["fc.weight"])
        x = shifted(states)
        embedded = target.model.embed_tokens(ids)[0]
        tokens = norm(embedded, w["midlayer.input_layernorm.weight"])
        both = torch.cat((tokens, norm(x, w["midlayer.hidden_norm.weight"])), dim=-1)
        attended = F.linear(_attend(both, w), w["midlayer.self_attn.o_proj.weight"])
        x = x + attended
        normed = norm(x, w["midlayer.post_attention_layernorm.weight"])
        gate, up = (F.linear(normed, w[f"midlayer.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, w["midlayer.mlp.down_proj.weight"])
        drafted = F.linear(norm(x[-1], w["norm.weight"]), w["lm_head.weight"])
    logits = last_logits(path, f"eagle:{head}", chunks)
    # Every third token of the target's can be drafted.
    target_ids = 3 * torch.arange(EAGLE_VOCAB_SIZE)
    torch.testing.assert_close(logits[target_ids], drafted, atol=1e-3, rtol=1e-3)
    assert int(torch.isfinite(logits).sum()) == EAGLE_VOCAB_SIZE


def _attend(x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    q, k, v = (F.linear(x, w[f"midlayer.self_attn.{part}_proj.weight"]).unflatten(-1, (-1, 8)) for part in "qkv")
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def rotated(y: torch.Tensor) -> torch.Tensor:
        a, b = y.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    q, k = rotated(q), rotated(k)
    scores = torch.einsum("ihd,jgd->hij", q, k) / 8**0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
    return torch.einsum("hij,jgd->ihd", scores.softmax(-1), v).flatten(1)
