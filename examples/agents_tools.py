"""Multi-turn tools with openai-agents.

Run `make up`, then `.venv/bin/python examples/agents_tools.py [chat|responses]`.
"""

import asyncio
import os
import sys

try:
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        RunConfig,
        Runner,
        TResponseInputItem,
        function_tool,
    )
    from openai import APIConnectionError, AsyncOpenAI, AuthenticationError
except ModuleNotFoundError:
    sys.exit("error: this example needs one more package: .venv/bin/python -m pip install openai-agents")

URL = os.environ.get("BATON_URL", f"http://127.0.0.1:{os.environ.get('HTTP_PORT', '8000')}")
APIS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
QUESTIONS = ["Hey, quick check: is everything up and running?", "Thank you! And now?"]


@function_tool
def get_system_health() -> dict[str, object]:
    """Returns the current health status of the LLM runtime—use before critical operations to verify the
    service is live."""
    return {"status": "ok", "uptime_seconds": 372045}


async def main(api: str) -> None:
    """Let the library run the tools until there is an answer, then ask the next question."""
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("KEY", "any")) as client:
        model = (await client.models.list()).data[0].id
        agent = Agent(
            name="Operator",
            model=APIS[api](model, client),
            tools=[get_system_health],
            model_settings=ModelSettings(temperature=0, max_tokens=300),
        )
        conversation: list[TResponseInputItem] = []
        for question in QUESTIONS:
            print("user:", question)
            run = Runner.run_streamed(
                agent,
                [*conversation, {"role": "user", "content": question}],
                run_config=RunConfig(tracing_disabled=True),
            )
            async for event in run.stream_events():
                if event.type == "run_item_stream_event":
                    print(" ", event.item.type)
            print("assistant:", run.final_output)
            conversation = run.to_input_list()


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "responses"
    if chosen not in APIS:
        sys.exit(f"usage: agents_tools.py [{'|'.join(APIS)}]")
    try:
        asyncio.run(main(chosen))
    except APIConnectionError:
        sys.exit(f"error: no Baton answers at {URL}: start it with `make up`, or set BATON_URL or NO_PROXY")
    except AuthenticationError:
        sys.exit(f"error: {URL} needs an API key: set KEY")
