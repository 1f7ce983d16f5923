"""The form that a chat body demands of its answer: `response_format`, `tool_choice` and strict tools."""

from baton.messages import Guided
from frontend.schema import AllowedToolsChoice, ChatBody, FunctionChoice, JsonObjectFormat, JsonSchemaFormat
from frontend.turn.form import ANY_OBJECT, AnswerFormat, CallChoice, OfferedTool, guided


def form_of(body: ChatBody) -> Guided | None:
    """The form, or None if nothing is demanded. Raises InvalidRequest, naming the field; see `guided`."""
    return guided(_offered(body), _choice(body), _answer_format(body))


def response_schema(body: ChatBody) -> tuple[str, object] | None:
    """(name, schema) for the prompt, if the body has one."""
    if not isinstance(body.response_format, JsonSchemaFormat):
        return None
    named = body.response_format.json_schema
    if named.schema is None:
        return None
    described = {} if named.description is None else {"description": named.description}
    return named.name, described | named.schema


def _offered(body: ChatBody) -> list[OfferedTool]:
    if body.tool_choice == "none":
        return []
    return [
        OfferedTool(
            name=tool.function.name,
            parameters=tool.function.parameters,
            strict=bool(tool.function.strict),
            param=f"tools[{i}].function.parameters",
        )
        for i, tool in enumerate(body.tools or ())
    ]


def _choice(body: ChatBody) -> CallChoice:
    match body.tool_choice:
        case FunctionChoice(function=function):
            return CallChoice(must_call=True, names=frozenset({function.name}))
        case AllowedToolsChoice(allowed_tools=allowed):
            names = frozenset(tool.function.name for tool in allowed.tools)
            return CallChoice(must_call=allowed.mode == "required", names=names)
        case choice:
            return CallChoice(must_call=choice == "required")


def _answer_format(body: ChatBody) -> AnswerFormat | None:
    match body.response_format:
        case JsonObjectFormat():
            return AnswerFormat(schema=ANY_OBJECT)
        case JsonSchemaFormat(json_schema=named):
            return AnswerFormat(
                schema=ANY_OBJECT if named.schema is None else named.schema,
                strict=bool(named.strict),
                param="response_format.json_schema.schema",
            )
        case _:
            return None
