"""This process's limit on open files (Linux)."""

import resource

# The kernel's own default; more would only slow programs that go through all possible descriptors.
MAX_FILES = 2**20


def raise_open_files_limit() -> int:
    """Raise the limit as far as the system allows. Return the number of files that may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return soft if soft != resource.RLIM_INFINITY else MAX_FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
