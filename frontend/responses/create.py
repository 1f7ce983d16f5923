"""`POST /v1/responses`: builds the answer from the body and the previous responses, or counts its tokens."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from baton.errors import BatonError, InvalidRequest
from frontend.harmony.conversation import (
    FUNCTIONS,
    Conversation,
    Instructions,
    Namespace,
    TextGrammar,
    Tool,
    called_name,
)
from frontend.http.body import convert, read
from frontend.http.respond import Asked, Services
from frontend.responses.body import (
    LOGPROBS,
    AdditionalTools,
    NamedTool,
    ResponseBody,
    ResponseTool,
    ToolChoice,
)
from frontend.responses.items import (
    ADDITIONAL_TOOLS,
    MACHINE_TOOLS,
    InputReader,
    Item,
    OutputItem,
    Reference,
    ToolSearchOutputItem,
    turns,
)
from frontend.responses.output import FailedAtOnce, ResponseAnswer
from frontend.responses.runs import ResponseState
from frontend.responses.store import MAX_CHAIN_BYTES, RUNNING, ResponseStore, StoredResponse
from frontend.turn.fields import NEAREST_EFFORT, answer_format, required
from frontend.turn.ids import vary
from frontend.turn.request import CallChoice, Client, TurnRequest, in_time

MAX_REFERENCES = 1000
"""Each is looked up in the store."""


async def ask_response(
    raw: bytes, client: Client, services: Services, state: ResponseState
) -> Asked[ResponseAnswer]:
    """See `frontend.http.respond.Ask`."""

    def reading(body: ResponseBody, _: int) -> InputReader:
        vary(raw)  # so that no other response is stored under the id of this one
        return InputReader(body.input, services.seal)

    body, unknown, reader = await read(raw, ResponseBody, reading)
    items = await resolved(reader.items, state.store, client.key_name)
    previous_id = body.previous_response_id
    earlier = [] if previous_id is None else await history(previous_id, state, client.key_name)
    # A short body may continue a long conversation, or refer to long items.
    recalls = bool(earlier) or any(isinstance(item, Reference) for item in reader.items.values())
    num_bytes = len(raw) + (MAX_CHAIN_BYTES if recalls else 0)
    offered, request = await in_time(num_bytes, partial(turn_request, body, earlier, items, num_bytes))
    ignored = [*unknown, *sorted(reader.left_out), *dict.fromkeys(offered.left_out)]
    if NEAREST_EFFORT[body.effort] != body.effort:
        ignored.append("reasoning.effort")
    if body.stream_options is not None and body.stream_options.include_timings:
        ignored.append("stream_options.include_timings")
    answer = partial(
        ResponseAnswer, body, [*items.values()], offered.machine, state.store, services.seal, client.key_name
    )
    asked = Asked(request, tuple(ignored), answer)
    return asked._replace(too_long=partial(FailedAtOnce, body)) if body.stream else asked


class PreviousNotFound(BatonError, code="previous_response_not_found", status=400):
    """The previous response, or one that it continues, is not stored."""


class _Output(msgspec.Struct):
    output: list[OutputItem]


async def history(response_id: str, responses: ResponseState, key_name: str) -> list[Item]:
    """All input and output items up to the end of the previous response, one of that key."""
    previous = await responses.find(response_id, key_name)
    if previous is not None and previous.status == RUNNING:
        raise InvalidRequest.at("previous_response_id", f"is {response_id!r}, which still runs; wait.")
    chain = await responses.store.chain(response_id, key_name)
    if chain is None:
        raise PreviousNotFound(
            f"`previous_response_id`: response {response_id!r} or one that it continues is not stored.",
            param="previous_response_id",
        )
    return await asyncio.to_thread(items_of, chain)


def items_of(chain: Sequence[StoredResponse], without_output_of: str = "") -> list[Item]:
    """The input and the output of each stored response, except the output of one."""
    items: list[Item] = []
    for response in chain:
        items += msgspec.json.decode(response.items, type=list[Item])
        if response.id != without_output_of:
            items += msgspec.json.decode(response.body, type=_Output).output
    return items


async def resolved(
    items: Mapping[str, Item | Reference], store: ResponseStore, key_name: str
) -> dict[str, Item]:
    """The items of `input`, also those that it refers to. Raises InvalidRequest if one is not stored."""
    if sum(isinstance(item, Reference) for item in items.values()) > MAX_REFERENCES:
        raise InvalidRequest.at("input", f"has more than {MAX_REFERENCES} item references; send the items.")
    found: dict[str, Item] = {}
    for path, item in items.items():
        if not isinstance(item, Reference):
            found[path] = item
            continue
        stored = await store.with_item(item.id, key_name)
        known = [] if stored is None else await asyncio.to_thread(items_of, [stored])
        referred = next((each for each in known if each.id == item.id), None)
        if referred is None:
            raise InvalidRequest.at(f"{path}.id", f"is {item.id!r}; no stored response has this item.")
        found[path] = referred
    return found


class OfferedTools(msgspec.Struct):
    """The tools that the prompt shows. `machine` are the types of machine tools among them, `left_out` the
    paths of hosted tools, which only OpenAI's servers run."""

    tools: list[Tool] = []
    machine: list[str] = []
    namespaces: list[Namespace] = []
    left_out: list[str] = []


def offered_tools(body: ResponseBody, earlier: Iterable[Item]) -> OfferedTools:
    """The tools that the model may see: the body's, and those that its searches, also `earlier` ones, found.
    Raises InvalidRequest, naming the field."""
    own = [(f"tools[{i}]", tool) for i, tool in enumerate(body.tools or ())]
    found = [
        ("previous_response_id", tool)
        for item in earlier
        if isinstance(item, ToolSearchOutputItem)
        for tool in msgspec.convert(item.tools, list[ResponseTool])
    ]
    for i, item in enumerate(body.input if isinstance(body.input, list) else ()):
        if item.get("type") in (ADDITIONAL_TOOLS, "tool_search_output"):
            tools = convert(item, AdditionalTools, f"input[{i}]").tools
            added = own if item["type"] == ADDITIONAL_TOOLS else found
            added += [(f"input[{i}].tools[{j}]", tool) for j, tool in enumerate(tools)]
    offered = OfferedTools()
    offered.tools = [made for path, tool in own for made in _tools(tool, path, offered)]
    known = {tool.called for tool in offered.tools}
    others = {made.called: made for path, tool in found for made in _tools(tool, path, offered)}
    offered.tools += [tool for name, tool in others.items() if name not in known]
    return OfferedTools(left_out=offered.left_out) if body.tool_choice == "none" else offered


def _tools(
    tool: ResponseTool, path: str, offered: OfferedTools, namespace: str = FUNCTIONS
) -> Iterator[Tool]:
    """The tools of a definition, which is noted in the other fields of `offered`."""
    kind, is_outer = tool.type, namespace == FUNCTIONS
    is_hosted = isinstance(tool.environment, dict) and "container" in str(tool.environment.get("type"))
    if kind in {"function", "custom"}:
        yield _tool(tool, path, namespace)
    elif kind == "namespace" and is_outer:
        name = required(tool.name, f"{path}.name")
        offered.namespaces.append(Namespace(name=name, description=tool.description))
        for j, inner in enumerate(tool.tools or ()):
            yield from _tools(inner, f"{path}.tools[{j}]", offered, name)
    elif is_hosted:
        offered.left_out.append(f"tools[].{kind}.environment"[:80])
    elif is_outer and kind in MACHINE_TOOLS and (kind != "tool_search" or tool.execution == "client"):
        offered.machine.append(kind)
        made = MACHINE_TOOLS[kind].function(kind, path)
        if tool.parameters is not None:
            description = tool.description or made.description
            made = replace(made, description=description, parameters=tool.parameters, strict=False)
        yield made
    else:
        offered.left_out.append(f"tools[].{kind}"[:80])


def _tool(tool: ResponseTool, path: str, namespace: str) -> Tool:
    unsupported = "async" if tool.is_async else "allowed_callers"
    if tool.is_async or "direct" not in (tool.allowed_callers or ["direct"]):
        raise InvalidRequest.at(f"{path}.{unsupported}", "is not supported.")
    grammar = None
    if tool.type == "custom" and tool.format is not None and tool.format.type == "grammar":
        grammar = TextGrammar(
            syntax=required(tool.format.syntax, f"{path}.format.syntax"),
            text=required(tool.format.definition or None, f"{path}.format.definition"),
            path=f"{path}.format.definition",
        )
    return Tool(
        name=required(tool.name, f"{path}.name"),
        description=tool.description,
        parameters=tool.parameters,
        strict=bool(tool.strict),
        takes_text=tool.type == "custom",
        grammar=grammar,
        namespace=namespace,
        path=path,
    )


def call_choice(body: ResponseBody) -> CallChoice:
    """Which tools may be called, and whether a call is required. Raises InvalidRequest."""
    choice = body.tool_choice
    if not isinstance(choice, ToolChoice):
        return CallChoice(must_call=choice == "required")
    if choice.type == "allowed_tools":
        tools = required(choice.tools, "tool_choice.tools")
        must_call = required(choice.mode, "tool_choice.mode") == "required"
        return CallChoice(must_call=must_call, names=frozenset(map(_called, tools)) - {""})
    if choice.type not in MACHINE_TOOLS:
        required(choice.name, "tool_choice.name")
    return CallChoice(must_call=True, names=frozenset({_called(choice)}))


def _called(tool: NamedTool | ToolChoice) -> str:
    """Machine tools are referred to by type; hosted tools have no name."""
    if tool.type in MACHINE_TOOLS:
        return tool.type
    return called_name(tool.namespace or FUNCTIONS, tool.name or "")


def turn_request(
    body: ResponseBody, earlier: Sequence[Item], items: Mapping[str, Item], num_bytes: int
) -> tuple[OfferedTools, TurnRequest]:
    """The request of the body after `earlier` items; `items` are its `input`, `num_bytes` the length of both.
    Instructions are those of this body only: the API does not carry them over."""
    offered = offered_tools(body, earlier)
    leading = () if body.instructions is None else (Instructions(body.instructions),)
    conversation = Conversation(
        turns=(*leading, *turns(earlier, items)),
        tools=tuple(offered.tools),
        namespaces=tuple(offered.namespaces),
        reasoning_effort=NEAREST_EFFORT[body.effort],
        answer_format=answer_format(None if body.text is None else body.text.format, "text.format"),
    )
    gives_logprobs = LOGPROBS in (body.include or ()) or body.top_logprobs is not None
    request = TurnRequest(
        fields=body,
        prompt=conversation,
        calls=call_choice(body),
        path="input",
        num_bytes=num_bytes,
        max_tokens=body.max_output_tokens,
        max_calls=body.max_calls,
        logprobs=(body.top_logprobs or 0) if gives_logprobs else None,
    )
    return offered, request
