"""Names a cluster of this host that is still starting, for a client that found none at its address."""

import re

from tandem.deploy.host.run_record import default_directory, find_runs

_NONE_ANSWERS = re.compile(r"no cluster answers at \S+:(\d+);")


def name_starting(message: str) -> str:
    """Returns a client's error, with the name of the cluster that may serve at its address later."""
    if not (found := _NONE_ANSWERS.match(message)):
        return message
    try:
        runs = find_runs(default_directory())
    except PermissionError:
        return message
    for run in runs:
        # Its address is not known before its model is.
        if run.about.state == "starting" and run.about.grpc.rpartition(":")[2] in ("", found[1]):
            at = message.partition(";")[0]
            return f"{at} yet: the cluster {run.about.name} is starting, and answers when it is ready"
    return message
