"""Exit statuses of a cluster's processes."""

# Failures, and mistakes of the user, as in shells and argparse.
FAILED = 1
USAGE = 2
# Plus the signal's number.
SIGNALLED = 128
# Distinct, so that Ray's log names the cause.
ENGINE_FAILED = 70
NO_ROUTER = 71
CONTROL_FAILED = 72
ROUTER_TASK_FAILED = 73
STALLED = 74
STORE_FAILED = 75
RANK_FAILED = 76
