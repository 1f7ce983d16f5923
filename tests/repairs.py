"""The messages of deltas, and the kinds of repairs: the labels of `baton_harmony_repairs_total`."""

from collections.abc import Sequence

from frontend.harmony.conversation import Begin, Delta, Text

REPAIRS = {
    "missing_start": "no `<|start|>` before a header",
    "missing_end": "a header inside a body, without `<|end|>`",
    "missing_message": "no `<|message|>`; any text was in the header",
    "missing_role": "`<|start|>` without a role",
    "wrong_role": "an unknown role",
    "foreign_author": "written as the user, the system or a tool; dropped",
    "missing_channel": "neither channel nor recipient",
    "missing_channel_marker": "a channel's name without `<|channel|>`",
    "repeated_channel": "more than one channel; the last valid one is used",
    "unknown_channel": "an unknown channel",
    "channel_as_recipient": "a tool's name after `<|channel|>`",
    "constrain_as_recipient": "a tool's name after `<|constrain|>`",
    "missing_recipient": "`to=` without a name",
    "bare_recipient": "a tool's name without `to=` or without `functions.`",
    "repeated_recipient": "more than one `to=`; the first one is used",
    "glued_name": "extra text attached to an offered tool's name",
    "unknown_content_type": "an unknown content type",
    "control_text": "a control token, or part of one, spelled as text in a header",
    "text_in_header": "text in a header with `<|message|>`; output as reasoning",
    "noise_in_header": "meaningless header words and punctuation; dropped",
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
