import pytest
import torch

from tandem.engine.batch import Batch
from tandem.engine.output import Feed, ForwardOutput
from tandem.engine.token_sequence import TokenSequence
from tests.fakes.engine import FakeEngine, FakeForwardOutput

CPU = torch.device("cpu")


def sequence(token_ids: list[int], *, num_pending: int) -> TokenSequence:
    """Return a sequence with all tokens computed but the last."""
    num_computed = len(token_ids) + num_pending - 1
    made = TokenSequence(token_ids, 1, [0], cached_len=num_computed, num_pending=num_pending)
    made.extend(1)
    return made


@pytest.fixture
def output() -> ForwardOutput:
    return FakeForwardOutput(FakeEngine(1, 4), [], None)


def test_pending_tokens_come_from_the_previous_step(output: ForwardOutput) -> None:
    sequences = [
        sequence([1, 2], num_pending=1),
        sequence([3, 4], num_pending=0),
        sequence([5], num_pending=1),
    ]
    batch = Batch("decode", sequences, Feed(output, [2, -1, 0]))
    assert batch.known_ids() == [0, 4, 0]
    assert batch.input_ids(CPU, torch.tensor([70, 80, 90])).tolist() == [90, 4, 70]
    assert batch.positions(CPU).tolist() == [2, 1, 1]


def test_without_a_feed_all_tokens_are_known() -> None:
    whole = TokenSequence([1, 2, 3], 3, [0])
    whole.extend(3)
    one = sequence([4, 5], num_pending=0)
    assert Batch("prefill", [whole, one]).input_ids(CPU).tolist() == [1, 2, 3, 5]


def test_mixed_batch_begins_with_decoded_sequences(output: ForwardOutput) -> None:
    decoded = [sequence([1, 2], num_pending=1), sequence([3, 4], num_pending=0)]
    chunk, last = TokenSequence([10, 11, 12], 3, [0]), TokenSequence([20, 21, 22, 23], 4, [1], cached_len=2)
    for prompt in (chunk, last):
        prompt.extend(2)
    batch = Batch.of(decoded, [chunk, last], Feed(output, [1, -1]))
    assert (batch.mode, batch.decoded, batch.prompts) == ("mixed", decoded, [chunk, last])
    assert batch.input_ids(CPU, torch.tensor([70, 80])).tolist() == [80, 4, 10, 11, 22, 23]
    assert batch.positions(CPU).tolist() == [2, 1, 0, 1, 2, 3]
    assert (batch.logits_rows(), batch.sampled_rows()) == ([0, 1, 5], [*decoded, last])
    assert (batch.num_tokens, batch.num_prompt_tokens()) == (6, 4)


def test_drafts_are_computed_behind_the_last_token() -> None:
    drafting, plain = TokenSequence([1, 2, 3], 1, [0], cached_len=2), sequence([4, 5], num_pending=0)
    drafting.draft_ids = (6, 7)
    drafting.extend(3)
    batch = Batch("decode", [drafting, plain])
    assert batch.input_ids(CPU).tolist() == [3, 6, 7, 5]
    assert batch.positions(CPU).tolist() == [2, 3, 4, 1]
    assert batch.logits_rows() == [0, 1, 2, 3]
    first, second, third, last = batch.sampled_rows()
    assert [row.length for row in (first, second, third, last)] == [3, 4, 5, 2]
    assert (second.token_ids, third.known_ids().tolist()) == ([1, 2, 3, 6], [1, 2, 3, 6, 7])
    assert (batch.num_tokens, batch.num_decoded_tokens, batch.num_prompt_tokens()) == (4, 4, 0)


def test_a_batch_of_one_kind_is_not_mixed() -> None:
    one, prompt = sequence([4, 5], num_pending=0), TokenSequence([1, 2], 2, [0])
    prompt.extend(2)
    decode, prefill = Batch.of([one], ()), Batch.of((), [prompt])
    assert (decode.mode, decode.decoded, decode.prompts) == ("decode", [one], ())
    assert (prefill.mode, prefill.decoded, prefill.prompts) == ("prefill", [], [prompt])


@pytest.mark.parametrize(("num_pending", "row"), [(0, 0), (1, -1), (2, 0)])
def test_exactly_one_pending_token_is_fed(output: ForwardOutput, num_pending: int, row: int) -> None:
    with pytest.raises(AssertionError):
        Batch("decode", [sequence([1, 2], num_pending=num_pending)], Feed(output, [row]))
