"""The messages of deltas, and the kinds of repairs: the labels of `baton_harmony_repairs_total`."""

from collections.abc import Sequence

from frontend.harmony.parse import Begin, Delta, Text

REPAIRS = {
    "malformed_header": "a header that is not as it should be, with its `<|message|>`",
    "missing_message": "no `<|message|>`; any text was in the header",
    "missing_end": "a header inside a body, without `<|end|>`",
    "foreign_author": "written as the user, the system or a tool; dropped",
    "forbidden_call": "a call although `tool_choice` is none; its arguments are output as reasoning",
    "stray_control": "a control token without meaning at its position",
}


def messages(deltas: Sequence[Delta]) -> list[dict[str, str]]:
    """One dict a message, as in the table of cases."""
    found: list[dict[str, str]] = []
    key = ""
    for delta in deltas:
        match delta:
            case Begin("call", name):
                key = "arguments"
                found.append({"call": name, key: ""})
            case Begin(kind):
                key = "reasoning" if kind == "thought" else kind
                found.append({key: ""})
            case Text(text):
                found[-1][key] += text
    return found
