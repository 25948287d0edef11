"""What a worker and its routers tell each other of adapters."""

import asyncio
from typing import Any

from tandem.adapters import AdapterEntry
from tandem.messages import AdapterChecked, AdapterPlaces, Adapters, CheckAdapter
from tandem.worker.adapter_exchange import AdapterExchange
from tandem.worker.events import AdaptersListed
from tests.fakes.link_ends import wait_until
from tests.fakes.scripted_adapters import make_ref

ENTRY = AdapterEntry("sql", 7, "r0", make_ref("a"))


def test_a_router_that_was_away_learns_the_names_of_the_others() -> None:
    events: list[Any] = []
    exchange = AdapterExchange(events.append, make_ref)
    assert exchange.greeting() == [Adapters(()), AdapterPlaces((), ())]
    assert exchange.merge(Adapters((ENTRY,))) == [ENTRY]
    assert exchange.merge(Adapters((ENTRY,))) == []
    exchange.note_places(AdapterPlaces(("a",), ()))
    assert exchange.greeting() == [Adapters((ENTRY,)), AdapterPlaces(("a",), ())]
    assert events[-1] == AdaptersListed(frozenset({"a"}))
    exchange.merge(Adapters((AdapterEntry("sql", 8, "r0"),)))
    assert events[-1] == AdaptersListed(frozenset())


def test_every_check_is_answered() -> None:
    def check(path: str) -> Any:
        if path == "wrong":
            raise ValueError("it has rank 99")
        if path == "broken":
            raise RuntimeError("no header")
        return make_ref("a")

    async def ask() -> list[Any]:
        exchange, answers = AdapterExchange(lambda event: None, check), []
        for number, path in enumerate(("right", "wrong", "broken")):
            exchange.check(CheckAdapter(str(number), path), answers.extend)
        await wait_until(lambda: len(answers) == 3)
        return sorted(answers, key=lambda answer: answer.check_id)

    assert asyncio.run(ask()) == [
        AdapterChecked("0", make_ref("a")),
        AdapterChecked("1", None, "it has rank 99"),
        AdapterChecked("2", None, "broken cannot be read: no header"),
    ]


def test_a_worker_without_adapters_says_so() -> None:
    assert AdapterExchange(lambda event: None).greeting() == []

    async def ask() -> list[Any]:
        exchange, answers = AdapterExchange(lambda event: None), []
        exchange.check(CheckAdapter("0", "any"), answers.extend)
        await wait_until(lambda: bool(answers))
        return answers

    [answer] = asyncio.run(ask())
    assert answer.adapter is None and "start the cluster with --max-loras" in answer.refusal
