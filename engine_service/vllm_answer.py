"""Answers of vLLM's engine API: what happens to a request, in that API's messages."""

from collections.abc import Sequence

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engine_service.request import FinishReason, GeneratedDelta, GenerationEnded, GenerationSpec, PromptComputed
from engine_service.sampling_params import SampledToken

_NAME_BY_FINISH_REASON = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}


class VllmAnswer:
    """The answer to one request: in parts and a last message for each sample, or in one message for each.

    Args:
        spec: the request.
        is_streamed: whether it comes in parts.
    """

    def __init__(self, spec: GenerationSpec, *, is_streamed: bool) -> None:
        self._spec = spec
        self._is_streamed = is_streamed
        self._tokens: list[list[SampledToken]] = [[] for _ in range(spec.num_samples)]
        self._input_logprobs: pb.InputLogProbs | None = None

    def build_prompt(self, computed: PromptComputed) -> None:
        """Keeps what is known of the prompt: it comes with each sample's first message."""
        if self._spec.num_prompt_logprobs is not None:
            self._input_logprobs = build_input_logprobs(self._spec, computed.logprobs)

    def build_delta(self, deltas: Sequence[GeneratedDelta], sample: int) -> bytes | None:
        """Returns a part, or None where the answer comes in one message."""
        is_first = not self._tokens[sample]
        tokens = [token for delta in deltas for token in delta.tokens]
        self._tokens[sample] += tokens
        if not self._is_streamed:
            return None
        chunk = pb.GenerateStreamChunk(
            token_ids=[token.token_id for token in tokens],
            prompt_tokens=len(self._spec.prompt_token_ids),
            # Of this part, as the gateway adds them up.
            completion_tokens=len(tokens),
            output_logprobs=self._build_output_logprobs(tokens),
            input_logprobs=self._input_logprobs if is_first else None,
            index=sample,
        )
        return pb.GenerateResponse(chunk=chunk).SerializeToString()

    def build_final(self, ended: GenerationEnded, sample: int) -> bytes:
        """Returns a sample's last message: all its tokens, and how it ended."""
        tokens = self._tokens[sample]
        complete = pb.GenerateComplete(
            output_ids=[token.token_id for token in tokens],
            finish_reason=_NAME_BY_FINISH_REASON[ended.finish_reason],
            prompt_tokens=ended.num_prompt_tokens,
            completion_tokens=ended.num_completion_tokens,
            cached_tokens=ended.num_cached_tokens,
            index=sample,
            matched_stop_str=ended.matched_stop,
            # As in vLLM, the model's own end of an answer is no match.
            matched_token_id=(
                ended.matched_token_id if ended.matched_token_id in self._spec.stopping.stop_token_ids else None
            ),
        )
        if not self._is_streamed:
            complete.MergeFrom(
                pb.GenerateComplete(
                    output_logprobs=self._build_output_logprobs(tokens), input_logprobs=self._input_logprobs
                )
            )
        return pb.GenerateResponse(complete=complete).SerializeToString()

    def _build_output_logprobs(self, tokens: Sequence[SampledToken]) -> pb.OutputLogProbs | None:
        if self._spec.num_logprobs is None:
            return None
        return pb.OutputLogProbs(
            token_logprobs=[token.logprob for token in tokens if token.logprob is not None],
            token_ids=[token.token_id for token in tokens],
            top_logprobs=_build_top_logprobs(tokens) if self._spec.num_logprobs else (),
        )


def build_input_logprobs(spec: GenerationSpec, tokens: Sequence[SampledToken]) -> pb.InputLogProbs:
    """Returns what is known of a prompt's tokens; its first one has no log-probability.

    Args:
        spec: the request.
        tokens: the prompt's tokens from the second on.
    """
    top = [pb.TopLogProbs(), *_build_top_logprobs(tokens)] if spec.num_prompt_logprobs else ()
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(), *[pb.InputTokenLogProb(value=token.logprob) for token in tokens]],
        token_ids=spec.prompt_token_ids,
        top_logprobs=top,
    )


def _build_top_logprobs(tokens: Sequence[SampledToken]) -> list[pb.TopLogProbs]:
    return [
        pb.TopLogProbs(
            values=[logprob for _, logprob in token.top_logprobs],
            token_ids=[token_id for token_id, _ in token.top_logprobs],
        )
        for token in tokens
    ]
