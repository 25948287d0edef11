"""Lets the model judge the first answers, and later answers that differ from them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.children import Child
from benchmarks.soak import confirm
from benchmarks.soak.case import Case
from benchmarks.soak.traffic import Difference, Tally

# For an output, beside a cluster on busy cores.
_CONFIRM_S = 300.0
# Return "" or the reason why the output is wrong. May raise TimeoutError, EOFError and OSError.
Judge = Callable[[Case], str]


@contextmanager
def judging(model_dir: Path) -> Iterator[Judge]:
    with Child(confirm.run, str(model_dir)) as child:
        yield lambda case: str(child.ask(case, _CONFIRM_S))


def confirm_firsts(cases: Sequence[tuple[str, Case]], judge: Judge) -> list[str]:
    """Return the first answers that the model does not confirm. Args: cases: each with the name of its request."""
    troubles: list[str] = []
    judged: list[Case] = []
    for name, case in cases:
        # Several kinds send the same request.
        if case in judged:
            continue
        judged.append(case)
        if objection := judge(case):
            troubles.append(f"{name}: {case.output!r}: {objection}")
    return troubles


def settle(differences: Sequence[Difference], tally: Tally, judge: Judge) -> list[str]:
    """Count each difference as a tie if the model confirms its answer, else as wrong. Returns remarks.

    An answer that the model cannot judge in time is wrong.
    """
    remarks: list[str] = []
    for difference in differences:
        counts = tally.kinds[difference.kind]
        try:
            objections = [judge(case) for case in difference.cases]
        except (TimeoutError, EOFError, OSError) as error:
            objections = [f"not judged: {type(error).__name__}"]
        if objection := "; ".join(filter(None, objections)):
            counts.num_wrong += 1
            tally.notes.append(f"{difference.line} ({objection})")
        else:
            counts.num_ties += 1
            remarks.append(f"rounding chose another token, as transformers confirms: {difference.line}")
    return remarks
