"""Workers know whose grammar they compile, by a digest."""

import asyncio

import pytest

from tandem.messages import Admit, Prefill
from tests.fakes.http_cluster import KEYS, PROMPT, HttpCluster
from tests.fakes.router_harness import settle


@pytest.mark.parametrize("body", [{"prompt": PROMPT}, {"messages": [{"role": "user", "content": PROMPT}]}])
def test_each_key_has_a_name_of_its_own_and_only_with_a_grammar(body: dict[str, object]) -> None:
    async def scenario() -> None:
        served = HttpCluster([65, 66], num_routers=1)

        async def named(key: str, **more: object) -> str:
            num_served = len(served.d.of(Admit))
            call = served.routers[0].post({**body, "max_tokens": 1, **more}, key=key)
            async with asyncio.timeout(60.0):
                while len(served.d.of(Admit)) == num_served:
                    await settle()
                    await asyncio.sleep(0.01)
            await served.serve(1)
            await call.finish()
            assert served.p.of(Prefill)[-1].client == served.d.of(Admit)[-1].client
            return served.d.of(Admit)[-1].client

        assert await named(KEYS[0]) == ""
        first, second = [await named(key, guided_regex="A+") for key in KEYS]
        assert first and second and first != second
        assert not any(key in name for key in KEYS for name in (first, second))

    asyncio.run(scenario())
