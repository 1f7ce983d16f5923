"""The tool-calling conversation of Dynamo's gpt-oss guide, as Baton renders it."""

from frontend.harmony.conversation import AssistantTurn, Conversation, Tool, ToolCall, ToolResult, UserTurn


def guide_conversation(*, second_round: bool) -> Conversation:
    """The multi-round example of Dynamo's gpt-oss guide."""
    description = (
        "Returns the current health status of the LLM runtime—use before critical operations "
        "to verify the service is live."
    )
    tool = Tool(
        name="get_system_health", description=description, parameters={"type": "object", "properties": {}}
    )
    call = ToolCall(call_id="call-1", name="get_system_health", arguments="{}")
    result = ToolResult(call_id="call-1", text='{"status":"ok","uptime_seconds":372045}')
    history = (AssistantTurn(tool_calls=(call,)), result) if second_round else ()
    turns = (UserTurn(text="Hey, quick check: is everything up and running?"), *history)
    return Conversation(turns=turns, tools=(tool,), reasoning_effort="low", current_date="2026-11-20")
