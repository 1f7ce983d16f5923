"""Multi-turn tool calling with the OpenAI SDK.

Run `make up`, then `.venv/bin/python examples/tool_calling.py`.
"""

import json
import os
import sys

try:
    from openai import APIConnectionError, AuthenticationError, OpenAI
    from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
except ModuleNotFoundError as missing:
    sys.exit(f"error: no package {missing.name} here: run this with .venv/bin/python, after `make up`")

URL = os.environ.get("BATON_URL", f"http://127.0.0.1:{os.environ.get('HTTP_PORT', '8000')}")
QUESTION = "Hey, quick check: is everything up and running?"
TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "get_system_health",
            "description": "Returns the current health status of the LLM runtime—use before critical "
            "operations to verify the service is live.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]


def get_system_health() -> dict[str, object]:
    """A stand-in for a real health check."""
    return {"status": "ok", "uptime_seconds": 372045}


def main() -> None:
    """Run the tools that the model calls until it answers."""
    client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("KEY", "any"))
    model = client.models.list().data[0].id
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
    print("user:", QUESTION)
    for _ in range(5):
        completion = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, reasoning_effort="low", max_tokens=300, temperature=0
        )
        message = completion.choices[0].message
        print("reasoning:", getattr(message, "reasoning_content", None))
        if not message.tool_calls:
            print("assistant:", message.content)
            return
        messages.append(message.to_dict())  # type: ignore[arg-type]  # as the SDK documents it
        for call in message.tool_calls:
            assert call.type == "function"
            result = json.dumps(get_system_health())
            print(f"tool: {call.function.name}({call.function.arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    sys.exit("no answer after five rounds")


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        sys.exit(f"error: no Baton answers at {URL}: start it with `make up`, or set BATON_URL or NO_PROXY")
    except AuthenticationError:
        sys.exit(f"error: {URL} needs an API key: set KEY")
