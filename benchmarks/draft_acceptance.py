"""Chances that a model's drafts are accepted, by temperature and by the way of drafting, on a CPU.

A draft is accepted if it equals the token that the sampler draws. Four ways to draft with a model q for a model p:

  same number   the sampler on q, with the same random number that will draw from p (Tandem)
  most likely   the most likely token of q
  other number  the sampler on q, with another random number
  rejection     drafts of q, accepted with probability min(1, p/q) (Leviathan et al. 2023), which no rule exceeds for
                independent drafts, but which draws other tokens than the sampler does without drafts

The chances are exact sums over the vocabulary, for each token of outputs that the model wrote at temperature 1.

  python -m benchmarks.draft_acceptance
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmarks.speculation import PROMPTS, run
from tandem.decode_worker.config import NO_SPECULATION
from tandem.engine.batch import Batch
from tandem.engine.build import build_engine
from tandem.engine.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.token_sequence import TokenSequence
from tandem.engine.weights.resolve import resolve_model
from tandem.sampling_params import SamplingParams

TEMPERATURES = (0.0, 0.5, 1.0)
WAYS = ("same number", "most likely", "other number", "rejection")
NUM_PAGES = 512


def build(model_dir: Path, name: str, *, quantization: str = "auto", num_layers: int = 0) -> Engine:
    """Args: num_layers: first layers to keep; 0: all."""
    config = EngineConfig(str(model_dir), num_pages=NUM_PAGES, num_threads=1, quantization=quantization)
    engine = build_engine(config, f"acceptance-{name}", lambda doing: None)
    assert isinstance(engine.model, DecoderModel)
    if num_layers:
        engine.model._layers = engine.model._layers[:num_layers]
    return engine


@torch.inference_mode()
def logits_of(engine: Engine, token_ids: Sequence[int], num_outputs: int) -> torch.Tensor:
    """Returns the logits from which the outputs were drawn, (num_outputs, vocab_size) float64."""
    sequence = TokenSequence([*token_ids], len(token_ids), range(NUM_PAGES))
    sequence.extend(len(token_ids) - 1)
    batch = Batch.of([], [sequence])
    engine._attention.plan(batch)
    ids, positions = batch.input_ids(engine.device), batch.positions(engine.device)
    hidden = engine.model.hidden_states(ids, positions, engine._attention)
    return engine.model.logits(hidden[-num_outputs:]).double()


def chances(p_logits: torch.Tensor, q_logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Returns the acceptance of each row in the order of WAYS, (num_rows, len(WAYS))."""
    if not temperature:
        is_equal = (p_logits.argmax(-1) == q_logits.argmax(-1)).double()
        return is_equal[:, None].expand(-1, len(WAYS))
    p, q = (logits.div(temperature).softmax(-1) for logits in (p_logits, q_logits))
    ends = torch.minimum(p.cumsum(-1), q.cumsum(-1))
    begins = torch.maximum(p.cumsum(-1) - p, q.cumsum(-1) - q)
    same = (ends - begins).clamp(min=0).sum(-1)
    most_likely = p.gather(1, q.argmax(-1, keepdim=True))[:, 0]
    return torch.stack((same, most_likely, (p * q).sum(-1), torch.minimum(p, q).sum(-1)), dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=27, help="layers of the drafter that lacks the last ones")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    model_dir = resolve_model(args.model)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    target = build(model_dir, "target")
    texts: list[tuple[list[int], int]] = []
    for kind, prompts in PROMPTS.items():
        ids = [tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n").ids for text in prompts]
        done = run(target, ids, SamplingParams(args.max_tokens, temperature=1.0, seed=1), NO_SPECULATION)
        texts += [(prompt + output, len(output)) for prompt, output in zip(ids, done.outputs.values(), strict=True)]
        print(f"wrote {len(ids)} outputs: {kind}", flush=True)
    expected = [logits_of(target, *text) for text in texts]
    target.close()
    drafters = {
        "the model itself": {},
        "the model in FP8": {"quantization": "fp8"},
        f"its first {args.layers} layers": {"num_layers": args.layers},
    }
    rows = []
    print(f"| drafter | temperature | {' | '.join(WAYS)} |\n{'|---' * (2 + len(WAYS))}|", flush=True)
    for name, options in drafters.items():
        drafter = build(model_dir, "drafter", **options)
        found = [logits_of(drafter, *text) for text in texts]
        drafter.close()
        for temperature in TEMPERATURES:
            of_rows = [chances(p, q, temperature) for p, q in zip(expected, found, strict=True)]
            means = torch.cat(of_rows).mean(0).tolist()
            rows.append({"drafter": name, "temperature": temperature, **dict(zip(WAYS, means, strict=True))})
            print(f"| {name} | {temperature:g} | {' | '.join(f'{mean:.1%}' for mean in means)} |", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
