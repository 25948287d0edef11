from tandem.engine.grammars import Constraint
from tandem.messages import Failed, Unservable


def grammar_failure(request_id: str, attempt: int, constraint: Constraint | None) -> Failed | Unservable | None:
    """Returns the message for a request whose grammar has failed, or None."""
    if constraint is None or not constraint.error:
        return None
    reason = f"the output cannot be kept to its grammar: {constraint.error}"
    return (Failed if constraint.may_do_better else Unservable)(request_id, attempt, reason)
