"""Answers that follow a schema, in both APIs.

Run `make up`, then `.venv/bin/python examples/structured_output.py`.
"""

import os
import sys
from typing import Literal

try:
    from openai import APIConnectionError, AuthenticationError, OpenAI, pydantic_function_tool
    from pydantic import BaseModel, Field
except ModuleNotFoundError as missing:
    sys.exit(f"error: no package {missing.name} here: run this with .venv/bin/python, after `make up`")

URL = os.environ.get("BATON_URL", f"http://127.0.0.1:{os.environ.get('HTTP_PORT', '8000')}")
QUESTION = "Hey, quick check: is everything up and running?"


class Report(BaseModel):
    """The schema of every answer below."""

    healthy: bool
    severity: Literal["none", "low", "high"]
    score: int = Field(ge=0, le=100)


def main() -> None:
    """A chat answer, a response, and a call with arguments that follow the schema."""
    client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("KEY", "any"))
    model = client.models.list().data[0].id

    chat = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        response_format=Report,
        temperature=0,
        max_tokens=300,
    )
    print("chat:", repr(chat.choices[0].message.parsed))

    response = client.responses.parse(
        model=model, input=QUESTION, text_format=Report, temperature=0, max_output_tokens=300
    )
    print("response:", repr(response.output_parsed))

    called = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[pydantic_function_tool(Report, name="get_system_health")],
        tool_choice="required",
        temperature=0,
        max_tokens=300,
    )
    for call in called.choices[0].message.tool_calls or ():
        print("call:", repr(call.function.parsed_arguments))


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        sys.exit(f"error: no Baton answers at {URL}: start it with `make up`, or set BATON_URL or NO_PROXY")
    except AuthenticationError:
        sys.exit(f"error: {URL} needs an API key: set KEY")
