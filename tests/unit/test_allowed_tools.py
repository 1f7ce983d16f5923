"""`tool_choice` of type `allowed_tools`: only the names count."""

import msgspec

from frontend.chat.request import ChatBody
from frontend.http.body import decode


def test_what_stands_beside_the_names_is_named_as_ignored() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": "", "strict": True}}
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool]}},
    }
    _, unknown = decode(msgspec.json.encode(body), ChatBody)
    path = "tool_choice.allowed_tools.tools[].function"
    assert unknown == (f"{path}.parameters", f"{path}.strict")
