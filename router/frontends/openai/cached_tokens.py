from collections.abc import Iterable

from tandem.messages import NO_HITS
from tandem.router.requests.tracker import RequestTracker


def cached_details(trackers: Iterable[RequestTracker]) -> dict[str, int]:
    """Returns the details of a usage's prompt tokens, over several prompts.

    The tiers of the page store are an extension. They are there only if it had a page, so clients of a cluster without
    a store see OpenAI's fields alone.
    """
    num_cached, loaded = 0, NO_HITS
    for tracker in trackers:
        num_cached += tracker.prompt_cached_len or 0
        loaded = loaded.plus(tracker.prompt_loaded)
    return {"cached_tokens": num_cached, **loaded.counts()}
