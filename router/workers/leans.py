"""Which work a worker that can do both is to be given first, and what a planner has to know for that.

A lean is told to routers by whoever plans for all of them (deploy/supervise/role_planner.py). It is a cost on the
other kind of
work (router/policies/cost_model.py): what the worker has goes on, and it still gets what would wait too long elsewhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from tandem.messages import ForwardTimes

# "none": nobody has planned anything. "both": others lean, and this one takes what those cannot.
Lean = Literal["none", "prefill", "decode", "both"]
LEANS: tuple[Lean, ...] = get_args(Lean)
NO_LEAN: Lean = "none"
# A plan that is not said again for so long is over, in seconds: whoever made it is gone.
GOOD_FOR_S = 5.0


@dataclass(frozen=True, slots=True)
class RouterDemand:
    """What one router has its workers do.

    Attributes:
        prompts, prompt_tokens, attended_tokens, elsewhere_tokens, elsewhere_attended: as of PromptCount
            (router/workers/prompt_count.py).
        num_decoding: requests of this router that each worker decodes or is going to, by its id; of all workers that do
            both and hand over.
        num_kv_tokens: of all these requests.
        times: of the forwards of one of these workers, which are taken to be alike.
        output_tokens: of a mean output.
        pool_tokens: that the smallest of their pools holds.
        max_decoding: requests that each decodes side by side at most.
    """

    prompts: int = 0
    prompt_tokens: int = 0
    attended_tokens: int = 0
    elsewhere_tokens: int = 0
    elsewhere_attended: int = 0
    num_decoding: Mapping[str, int] = field(default_factory=dict)
    num_kv_tokens: int = 0
    times: ForwardTimes = field(default_factory=ForwardTimes)
    output_tokens: float = 0.0
    pool_tokens: int = 0
    max_decoding: int = 0
