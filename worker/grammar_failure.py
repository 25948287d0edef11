"""What a worker says of a request whose output it cannot keep to its grammar."""

from engine.grammars import Constraint
from tandem.messages import Failed, Unservable


def grammar_failure(request_id: str, attempt: int, constraint: Constraint) -> Failed | Unservable:
    """Args: constraint: with an error."""
    reason = f"the output cannot be kept to its grammar: {constraint.error}"
    return (Failed if constraint.may_do_better else Unservable)(request_id, attempt, reason)
