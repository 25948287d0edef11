"""Exit statuses of a cluster's processes."""

# Failures, and mistakes that the user can correct, as for shells and argparse.
FAILED = 1
USAGE = 2
# Plus the signal's number, as for shells.
SIGNALLED = 128
# Exits of the cluster's own processes, distinct so that Ray's log names the cause.
ENGINE_FAILED = 70
NO_ROUTER = 71
CONTROL_FAILED = 72
ROUTER_TASK_FAILED = 73
STALLED = 74
