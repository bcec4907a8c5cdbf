"""Requests of a load as the engine takes them."""

from collections.abc import Sequence

import numpy as np

from ringplan.inference.v1 import inference_pb2 as pb
from ringplan_cli.load.options import LoadOptions
from ringplan_cli.load.schedule import LoadRequest


class MessageBuilder:
    """Turns requests of a load into messages, the same each time.

    Args:
        vocab_size: number of token ids.
        eos_token_ids: left out of prompts.
        options: how answers are chosen and end.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int], options: LoadOptions) -> None:
        self._token_ids = np.setdiff1d(np.arange(vocab_size), np.asarray(eos_token_ids, np.int64))
        self._options = options

    def build(self, request: LoadRequest, number: int) -> pb.GenerateRequest:
        """Builds a message.

        Args:
            request: what is asked.
            number: its place in the load, for the engine's logs.

        Returns:
            The message; prompt and contexts are token ids drawn by chance, unless the request has a text.
        """
        random = np.random.default_rng(request.seed)
        message = pb.GenerateRequest(
            request_id=f"load-{number}",
            sampling=pb.SamplingParams(temperature=self._options.temperature, seed=request.seed),
            stopping=pb.StoppingParams(max_tokens=request.max_tokens, ignore_eos=self._options.ignore_eos),
        )
        if request.text is not None:
            message.text = request.text
        else:
            message.token_ids.CopyFrom(self._draw(random, request.prompt_tokens or 1))
        for num_tokens in request.guidance_tokens:
            context = message.guidance.add(scale=self._options.guidance_scale)
            context.token_ids.CopyFrom(self._draw(random, num_tokens))
        if request.n > 1:
            message.n = request.n
        return message

    def _draw(self, random: np.random.Generator, num_tokens: int) -> pb.TokenIds:
        return pb.TokenIds(ids=random.choice(self._token_ids, num_tokens).tolist())
