"""What a worker says of a request whose output it cannot keep to its grammar."""

from tandem.engine.grammars import Constraint
from tandem.messages import Failed, Unservable


def grammar_failure(request_id: str, attempt: int, constraint: Constraint | None) -> Failed | Unservable | None:
    """Args: constraint: what keeps the output to its grammar, None if it has none. None: so far it does."""
    if constraint is None or not constraint.error:
        return None
    reason = f"the output cannot be kept to its grammar: {constraint.error}"
    return (Failed if constraint.may_do_better else Unservable)(request_id, attempt, reason)
