"""Messages of the answers of Generate."""

import asyncio
from array import array
from typing import Any

import grpc

from tandem.router.frontends.generation import Generation, Piece
from tandem.router.requests.prompt_logprobs import PromptLogprobs
from tandem.router.requests.tracker import RequestTracker
from tandem.router.resumption import OutputProof
from tandem.rpc.codec import LOGPROBS_CODEC
from tandem.v1 import inference_pb2 as pb

# Numbers added to a message at once, in about half a millisecond.
MAX_TURN_NUMBERS = 4096
FINISH_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


class Responses:
    """The messages of one call to Generate."""

    def __init__(self, request_id: str, generation: Generation, resume_token: bytes, proof: OutputProof) -> None:
        self._request_id = request_id
        self._generation = generation
        self._resume_token = resume_token
        self._proof = proof

    def next(self, piece: Piece) -> pb.GenerateResponse:
        if piece.finish_reason:
            return _last_response(self._request_id, piece, self._generation)
        if not (self._resume_token or piece.logprobs):
            return pb.GenerateResponse(
                request_id=self._request_id,
                index=piece.index,
                token_ids=piece.token_ids,
                text=piece.text,
                resume_proof=self._proof.add(piece.token_ids),
            )
        resume_token, self._resume_token = self._resume_token, b""
        return pb.GenerateResponse(
            request_id=self._request_id,
            index=piece.index,
            token_ids=piece.token_ids,
            text=piece.text,
            logprobs=map(LOGPROBS_CODEC.encode, piece.logprobs) if piece.logprobs else None,
            resume_token=resume_token,
            resume_proof=self._proof.add(piece.token_ids),
        )

    def take_scored(self, piece: Piece) -> PromptLogprobs | None:
        """Returns the prompt's log probabilities if they go with this piece: the first with tokens."""
        if not self._resume_token or piece.finish_reason:
            return None
        return self._generation.tracker.prompt_logprobs


async def write_scored(
    context: grpc.aio.ServicerContext, response: pb.GenerateResponse, scored: PromptLogprobs
) -> None:
    """Adds the prompt's log probabilities in turns with the loop: half a million numbers take 25 ms."""
    proto = response.prompt_logprobs
    proto.SetInParent()
    proto.num_top = scored.num_top
    numbers: tuple[tuple[Any, array[Any]], ...] = (
        (proto.logprobs, scored.logprobs),
        (proto.ranks, scored.ranks),
        (proto.top_token_ids, scored.top_ids),
        (proto.top_logprobs, scored.top_logprobs),
    )
    for field, values in numbers:
        for start in range(0, len(values), MAX_TURN_NUMBERS):
            field.extend(values[start : start + MAX_TURN_NUMBERS])
            await asyncio.sleep(0)
    await context.write(response)


def usage_of(tracker: RequestTracker, num_output_tokens: int = 0) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=len(tracker.prompt_ids),
        cached_tokens=tracker.prompt_cached_len or 0,
        completion_tokens=num_output_tokens,
        **tracker.prompt_loaded.counts(),
    )


def _last_response(request_id: str, piece: Piece, generation: Generation) -> pb.GenerateResponse:
    tracker = generation.tracker
    placed = tracker.placed
    response = pb.GenerateResponse(
        request_id=request_id,
        index=piece.index,
        text=piece.text,
        finish_reason=FINISH_REASONS[piece.finish_reason],
        usage=usage_of(tracker, generation.num_output_tokens),
        clock_uncertainty_ms=tracker.clock_uncertainty_ns / 1e6,
        handover=pb.HandoverSummary(
            prefill_worker=tracker.prefill_worker_id,
            decode_worker=tracker.decode_worker_id,
            attempts=tracker.attempt + 1,
            page_size=generation.page_size(),
            prefill_cached_tokens=tracker.prefill_cached_len,
            decode_cached_tokens=tracker.decode_cached_len,
            pages_computed=tracker.num_pages_computed,
            pages_shipped=tracker.num_pages_shipped,
            placement=placed.placement if placed else "",
            placement_reason=placed.reason if placed else "",
            estimated_ttft_ms=placed.ttft_ms if placed else 0.0,
            estimated_itl_ms=placed.itl_ms if placed else 0.0,
            drafted_tokens=tracker.num_drafted,
            accepted_tokens=tracker.num_accepted,
        ),
    )
    # Adding phases in place takes half the time of copying them.
    add_phase = response.phases.add
    for name, start_ms, duration_ms, on_critical_path in generation.timings:
        add_phase(name=name, start_ms=start_ms, duration_ms=duration_ms, on_critical_path=on_critical_path)
    return response
