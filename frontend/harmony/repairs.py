"""The kinds of repair that the parser counts: what was wrong with a message, in `HarmonyParser.repairs`."""

REPAIRS = {
    "missing_start": "no `<|start|>` before a header",
    "missing_end": "a header began inside a body",
    "missing_message": "no `<|message|>`: the text stood in the header",
    "missing_role": "`<|start|>` without a role",
    "wrong_role": "a role that there is not",
    "missing_channel": "neither channel nor recipient",
    "missing_channel_marker": "a channel's name without `<|channel|>`",
    "repeated_channel": "more than one channel; the last one that there is counts",
    "unknown_channel": "a channel that there is not",
    "channel_as_recipient": "a tool's name after `<|channel|>`",
    "constrain_as_recipient": "a tool's name after `<|constrain|>`",
    "missing_recipient": "`to=` without a name",
    "bare_recipient": "a tool's name without `to=` or without `functions.`",
    "repeated_recipient": "more than one `to=`; the first one counts",
    "glued_name": "something stuck to an offered tool's name",
    "unknown_content_type": "a content type that there is not",
    "control_text": "a control token spelled as text in a header, or part of one",
    "text_in_header": "text in a header that has its `<|message|>`; it comes out as reasoning",
    "stray_control": "a control token where it means nothing",
}
