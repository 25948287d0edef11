from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.layers.experts.counts import staged_rows
from tests.cluster.tiny_experts import save_tiny_experts
from tests.fakes.draft_layers import TOKENS, last_logits, norm, shifted
from tests.fakes.tiny_drafters import add_mtp_layer


@pytest.mark.parametrize("chunks", [(10,), (3, 1, 6)], ids=["whole", "chunks"])
def test_layer_for_further_tokens(tmp_path: Path, chunks: tuple[int, ...]) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.masking_utils import create_causal_mask

    path = tmp_path / "tiny"
    save_tiny_experts(path, "deepseek_v3")
    # It ignores the layer that is added.
    target = AutoModelForCausalLM.from_pretrained(path).eval()
    add_mtp_layer(path)
    prefix = "model.layers.2."
    weights = {k.removeprefix(prefix): v for k, v in load_file(path / "model.safetensors").items() if prefix in k}
    # A layer of the same kind.
    layer = target.model.layers[1]
    own = {k: v for k, v in weights.items() if k.startswith(("self_attn.", "input_layernorm.", "post_attention_"))}
    own |= {"mlp.gate.weight": weights["mlp.gate.weight"]}
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        states = target.model(ids).last_hidden_state[0]
        embedded = target.model.embed_tokens(ids)[0]
        eps = target.config.rms_norm_eps
        tokens, before = (
            norm(embedded, weights["enorm.weight"], eps),
            norm(shifted(states), weights["hnorm.weight"], eps),
        )
        x = F.linear(torch.cat((tokens, before), dim=-1), weights["eh_proj.weight"])[None]
        renamed = _for_transformers(layer.state_dict(), weights)
        layer.load_state_dict(renamed)
        positions = torch.arange(len(TOKENS))[None]
        rotation = target.model.rotary_emb(x, position_ids=positions)
        mask = create_causal_mask(target.config, x, None, None, position_ids=positions)
        out = layer(x, attention_mask=mask, position_embeddings=rotation, position_ids=positions)
        out = out[0] if isinstance(out, tuple) else out
        expected = F.linear(norm(out[0, -1], weights["shared_head.norm.weight"], eps), target.lm_head.weight)
    torch.testing.assert_close(last_logits(path, "mtp", chunks), expected, atol=1e-3, rtol=1e-3)


def _for_transformers(held: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns a checkpoint's layer under the names of transformers' module, which may stack the experts."""
    if "mlp.experts.gate_up_proj" not in held:
        return {name: weights[name] for name in held}
    num_experts = len(held["mlp.experts.down_proj"])
    parts = {
        kind: torch.stack([weights[f"mlp.experts.{i}.{kind}_proj.weight"] for i in range(num_experts)])
        for kind in ("gate", "up", "down")
    }
    stacked = {
        "mlp.experts.gate_up_proj": torch.cat((parts["gate"], parts["up"]), dim=1),
        "mlp.experts.down_proj": parts["down"],
    }
    return {name: stacked[name] if name in stacked else weights[name] for name in held}


def test_experts_of_padded_passes_are_those_of_all_tokens(tmp_path: Path) -> None:
    """A state needs every row of the last layer, so all rows but padding must have experts there."""
    path = tmp_path / "tiny"
    save_tiny_experts(path, "deepseek_v3")
    add_mtp_layer(path)
    staged = torch.from_numpy(staged_rows(9, 2))
    for drafter, num_rows in (("mtp", 9), ("", 2)):
        engine = build_engine(EngineConfig(str(path), num_threads=1, drafter=drafter), "counted", lambda doing: None)
        assert engine.expert_counts is not None
        last = engine.expert_counts.of_layer(1)
        assert last is not None
        with engine.model.counting(staged):
            assert last.counted_rows.tolist() == [num_rows, 0, 0]
        engine.close()
