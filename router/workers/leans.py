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
    """One router's demand on the planned workers, for the planners of roles and of sizes. Counters only grow.

    Attributes:
        prompts, prompt_tokens, attended_tokens, elsewhere_tokens, elsewhere_attended, whole_tokens: counters as in
            PromptCount.
        num_decoding: this router's requests in decode or bound for it, by id of each worker that decodes.
        num_kv_tokens: KV tokens of these requests.
        times: forward times of one worker, taken as equal. Parts of prompts are a prefill worker's.
        output_tokens: mean output length.
        pool_tokens: size of the smallest pool, in tokens.
        max_decoding: smallest decode batch limit, in requests.
        arrivals: counter of requests, with those that wait and those refused for lack of room.
        num_waiting: requests without a first token.
        waiting_tokens: their prompt tokens yet to compute.
        oldest_wait_s: age of the oldest of them, in seconds.
        num_unplaced: requests without a pair of workers.
        finished, finished_tokens, finished_steps: counters of finished requests, their output tokens and decode steps.
        is_measured: whether `times` are of workers past their first forward passes.
        cpu_s: counter of CPU seconds of this router's event loop.
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
    whole_tokens: int = 0
    arrivals: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    oldest_wait_s: float = 0.0
    num_unplaced: int = 0
    finished: int = 0
    finished_tokens: int = 0
    finished_steps: int = 0
    is_measured: bool = False
    cpu_s: float = 0.0
