"""A conversation whose state the server keeps.

Run `make up`, then `.venv/bin/python examples/responses_state.py`.
"""

import json
import os
import sys

try:
    from openai import APIConnectionError, AuthenticationError, OpenAI
    from openai.types.responses import FunctionToolParam, Response, ResponseInputParam
except ModuleNotFoundError as missing:
    sys.exit(f"error: no package {missing.name} here: run this with .venv/bin/python, after `make up`")

URL = os.environ.get("BATON_URL", f"http://127.0.0.1:{os.environ.get('HTTP_PORT', '8000')}")
TOOL: FunctionToolParam = {
    "type": "function",
    "name": "get_system_health",
    "description": "Returns the current health status of the LLM runtime—use before critical operations to "
    "verify the service is live.",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}


def say(client: OpenAI, given: str | ResponseInputParam, previous: Response | None) -> Response:
    """Send only the new input; the server has the rest. Prints the answer while it is generated."""
    with client.responses.stream(
        model=client.models.list().data[0].id,
        input=given,
        previous_response_id=previous.id if previous else None,
        tools=[TOOL],
        reasoning={"effort": "low"},
        temperature=0,
        max_output_tokens=300,
    ) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
        return stream.get_final_response()


def main() -> None:
    """Ask two questions; the second does not repeat the first, which the server remembers."""
    client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("KEY", "any"))
    response = None
    for question in ("Hey, quick check: is everything up and running?", "Thank you! And now?"):
        print("user:", question)
        response = say(client, question, response)
        while calls := [item for item in response.output if item.type == "function_call"]:
            result = json.dumps({"status": "ok", "uptime_seconds": 372045})
            print("tool:", *(f"{call.name}({call.arguments}) -> {result}" for call in calls))
            response = say(
                client,
                [{"type": "function_call_output", "call_id": c.call_id, "output": result} for c in calls],
                response,
            )
        print()
    assert response is not None
    print("kept:", [item.type for item in client.responses.input_items.list(response.id, order="asc")])


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        sys.exit(f"error: no Baton answers at {URL}: start it with `make up`, or set BATON_URL or NO_PROXY")
    except AuthenticationError:
        sys.exit(f"error: {URL} needs an API key: set KEY")
