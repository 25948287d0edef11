"""A response's events add up to the response, for any parts of an output."""

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tandem.router.errors import UnavailableError
from tandem.router.frontends.responses.answer import ResponseAnswer
from tandem.router.frontends.responses.schema import ResponseRequest
from tandem.router.text.output_parts import Part
from tests.fakes.given_output import GivenOutput, outputs


def answer_of(output: GivenOutput, ended: list[Any]) -> ResponseAnswer:
    async def keep(response: dict[str, Any]) -> None:
        ended.append(response)

    body = ResponseRequest.model_validate({"input": "hi"})
    return ResponseAnswer(body, output, "resp_1", "fake", keep)  # type: ignore[arg-type]


class Client:
    """A client that checks and joins events."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.done: list[dict[str, Any]] = []
        self.text = ""
        self.logprobs: list[Any] = []
        self.num_events = 0

    def take(self, events: list[tuple[str, dict[str, Any]]]) -> None:
        for name, content in events:
            assert (content["type"], content["sequence_number"]) == (name, self.num_events)
            self.num_events += 1
            if "output_index" in content:
                self._take_of_item(name.removeprefix("response."), content)

    def _take_of_item(self, name: str, content: dict[str, Any]) -> None:
        if name == "output_item.added":
            # One item is open at a time.
            assert content["output_index"] == len(self.items) == len(self.done)
            self.items.append(content["item"])
            self.text, self.logprobs = "", []
            return
        item = self.items[-1]
        assert content["output_index"] == len(self.items) - 1
        if name == "output_item.done":
            assert content["item"]["id"] == item["id"]
            self.done.append(content["item"])
            return
        assert content["item_id"] == item["id"]
        if name.endswith(".delta"):
            self.text += content["delta"]
            self.logprobs += content.get("logprobs", [])
        elif name == "function_call_arguments.done":
            assert (content["arguments"], content["name"]) == (self.text, item["name"])
        elif name.endswith("_text.done"):
            assert content["text"] == self.text
            assert content.get("logprobs", []) == self.logprobs
        elif name == "content_part.done":
            assert content["part"]["text"] == self.text
            assert content["part"].get("logprobs", []) == self.logprobs


@given(outputs(), st.sampled_from(["stop", "length"]))
def test_events_put_together_are_the_response(parts: list[Part], finish_reason: str) -> None:
    ended: list[dict[str, Any]] = []
    answer = answer_of(GivenOutput(finish_reason), ended)
    client = Client()
    client.take(answer.begin())
    for part in parts:
        client.take(answer.add(part))
    last = answer.end()
    client.take(last)
    asyncio.run(answer.finish())
    response = answer.whole()
    assert ended == [response] == [last[-1][1]["response"]]
    assert client.done == response["output"]
    status = "completed" if finish_reason == "stop" else "incomplete"
    assert (last[-1][0], response["status"]) == (f"response.{status}", status)
    assert [item["status"] for item in response["output"]] == ["completed"] * (len(client.done) - 1) + [status]
    found = "".join(
        item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"] for item in client.done
    )
    assert found == "".join(part.text for part in parts if part.kind != "call")
    calls = [item["name"] for item in client.done if item["type"] == "function_call"]
    assert calls == [part.text for part in parts if part.kind == "call"]
    assert len({item["id"] for item in client.done}) == len(client.done)


@given(outputs())
def test_a_failed_response_has_what_came_before(parts: list[Part]) -> None:
    ended: list[dict[str, Any]] = []
    answer = answer_of(GivenOutput(), ended)
    answer.begin()
    for part in parts:
        answer.add(part)
    ((name, content),) = answer.fail(UnavailableError("gone"))
    response = content["response"]
    assert (name, response["status"], response["error"]["message"]) == ("response.failed", "failed", "gone")
    assert not ended
    assert [item["status"] for item in response["output"]][-1:] == (["incomplete"] if parts else [])
