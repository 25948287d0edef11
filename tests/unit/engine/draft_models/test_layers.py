"""Drafters' layers against formulas over whole sequences."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.draft_models.drafted_model import DraftedModel
from tandem.engine.token_sequence import TokenSequence
from tests.cluster.conftest import save_tiny_model
from tests.cluster.tiny_experts import save_tiny_experts
from tests.fakes.tiny_drafters import EAGLE_VOCAB_SIZE, add_mtp_layer, save_eagle_head

TOKENS = [5, 7, 9, 200, 13, 15, 17, 3, 8, 61, 44]
EPS = 1e-5


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def shifted(states: torch.Tensor) -> torch.Tensor:
    """Returns the state of the token before each, zeros before the first."""
    return torch.cat((torch.zeros_like(states[:1]), states[:-1]))


def last_logits(path: Path, drafter: str, chunks: tuple[int, ...]) -> torch.Tensor:
    """Returns the drafter's logits behind the last token, whose row follows a prefill of the others in chunks."""
    config = EngineConfig(str(path), page_size=4, num_pages=20, num_threads=1, drafter=drafter)
    engine = build_engine(config, f"draft-layers-{path.name}", lambda doing: None)
    model, found = engine.model, []
    assert isinstance(model, DraftedModel) and engine.draft_maker is not None
    logits = model.drafter.logits

    def seen(hidden: torch.Tensor) -> torch.Tensor:
        found.append(logits(hidden))
        return found[-1]

    model.drafter.logits = seen  # type: ignore[method-assign]
    sequence = TokenSequence([*TOKENS], len(TOKENS), range(10))
    for num_tokens in chunks:
        sequence.extend(num_tokens)
        engine.forward(Batch.of([], [sequence])).token_ids()
        sequence.complete_extend()
    engine.draft_maker.make([sequence], [1])
    engine.close()
    return found[0][0]


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
