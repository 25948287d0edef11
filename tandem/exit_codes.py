"""How the processes of a cluster end, for those who read exit statuses."""

# What a person started went wrong, or can be put right by that person; as shells and argparse have it.
FAILED = 1
USAGE = 2
# A signal's number is added, as shells have it.
SIGNALLED = 128
# A process of the cluster ends itself with one of these. They differ, so that Ray's log of a death says which it was.
ENGINE_FAILED = 70
NO_ROUTER = 71
CONTROL_FAILED = 72
ROUTER_TASK_FAILED = 73
STALLED = 74
