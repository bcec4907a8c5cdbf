"""Requests of a load become messages that an engine takes."""

from ringplan_cli.load.messages import MessageBuilder
from ringplan_cli.load.options import LoadOptions
from ringplan_cli.load.schedule import LoadRequest


def test_message_asks_for_what_the_request_says() -> None:
    """Lengths, contexts, samples and how the answer ends."""
    builder = MessageBuilder(50, [3, 7], LoadOptions(guidance_scale=2.5, temperature=0.5))
    message = builder.build(LoadRequest(1.0, 11, max_tokens=9, prompt_tokens=300, n=2, guidance_tokens=(4, 5)), 17)
    assert message.request_id == "load-17"
    assert len(message.token_ids.ids) == 300
    assert set(message.token_ids.ids) == set(range(50)) - {3, 7}
    assert [(len(context.token_ids.ids), context.scale) for context in message.guidance] == [(4, 2.5), (5, 2.5)]
    assert (message.n, message.stopping.max_tokens, message.stopping.ignore_eos) == (2, 9, True)
    assert (message.sampling.temperature, message.sampling.seed) == (0.5, 11)


def test_same_request_is_the_same_message() -> None:
    """A trace that is sent again asks for the same tokens; another seed for others."""
    builder = MessageBuilder(1_000, [], LoadOptions())
    one, other = LoadRequest(0.0, 1, 8, prompt_tokens=20), LoadRequest(0.0, 2, 8, prompt_tokens=20)
    assert builder.build(one, 0) == builder.build(one, 0)
    assert builder.build(one, 0).token_ids != builder.build(other, 0).token_ids


def test_text_is_sent_as_text() -> None:
    """A trace may have prompts of its own."""
    message = MessageBuilder(50, [], LoadOptions(ignore_eos=False)).build(LoadRequest(0.0, 1, 8, text="Why?"), 0)
    assert message.text == "Why?"
    assert not message.HasField("token_ids")
    assert not message.HasField("n")
    assert not message.stopping.ignore_eos
