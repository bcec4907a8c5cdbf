"""Reading protobuf messages: what cannot be read is bad input, with its field where that can be told."""

import pytest

from engine_service.errors import InvalidRequestError
from engine_service.parsing import parse
from ringplan.inference.v1 import inference_pb2 as pb


@pytest.mark.parametrize("data", [b"\xff", b"\x12\x7fabc", b"\x0b"])
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    """Anything can arrive as bytes; it is bad input, not a fault within."""
    with pytest.raises(InvalidRequestError, match="GenerateRequest"):
        parse(pb.GenerateRequest, data)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.GenerateRequest(text="QQ"), "text"),
        (pb.GenerateRequest(stopping=pb.StoppingParams(stop=["fine", "QQ"])), "stopping.stop"),
        (
            pb.GenerateRequest(guidance=[pb.GuidanceContext(messages=[pb.ChatMessage(role="fine", content="QQ")])]),
            "guidance.messages.content",
        ),
    ],
)
def test_text_that_is_not_utf8_is_found(message: pb.GenerateRequest, field: str) -> None:
    """However deep it is; protobuf itself names no field."""
    with pytest.raises(InvalidRequestError, match="UTF-8") as caught:
        parse(pb.GenerateRequest, message.SerializeToString().replace(b"QQ", b"\xc3\x28"))
    assert caught.value.field == field
