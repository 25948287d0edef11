"""Leans: the kind of work that a worker of role `both` gets first.

The role planner (deploy/supervise/role_planner.py) sends leans to all routers. A lean is only a cost of the other kind
of work (router/policies/cost_model.py): running work continues, and overflow is still accepted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from tandem.messages import ForwardTimes

# "none": there is no plan. "both": other workers lean, and this one takes their overflow.
Lean = Literal["none", "prefill", "decode", "both"]
LEANS: tuple[Lean, ...] = get_args(Lean)
NO_LEAN: Lean = "none"
# Lifetime of a plan in seconds: without repetition its planner is gone.
GOOD_FOR_S = 5.0


@dataclass(frozen=True, slots=True)
class RouterDemand:
    """One router's demand on the workers that hand over in role `both`.

    Attributes:
        prompts, prompt_tokens, attended_tokens, elsewhere_tokens, elsewhere_attended: as in PromptCount.
        num_decoding: this router's requests in decode or bound for it, by worker id.
        num_kv_tokens: KV tokens of these requests.
        times: forward times of one worker, taken as equal.
        output_tokens: mean output length.
        pool_tokens: size of the smallest pool, in tokens.
        max_decoding: smallest decode batch limit, in requests.
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
