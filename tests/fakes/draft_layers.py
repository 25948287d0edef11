"""What tests of drafters' layers share: formulas over whole sequences, and an engine's results."""

from pathlib import Path

import torch

from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.draft_models.drafted_model import DraftedModel
from tandem.engine.token_sequence import TokenSequence

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

    model.drafter.logits = seen  # type: ignore[method-assign, assignment]
    sequence = TokenSequence([*TOKENS], len(TOKENS), range(10))
    for num_tokens in chunks:
        sequence.extend(num_tokens)
        engine.forward(Batch.of([], [sequence])).token_ids()
        sequence.complete_extend()
    engine.draft_maker.make([sequence], [1])
    engine.close()
    return found[0][0]
