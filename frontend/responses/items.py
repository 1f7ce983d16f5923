"""The items of a response's input and output: read from bodies, stored, and as turns of a conversation."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, cast, get_args

import msgspec
from msgspec import UNSET, UnsetType

from baton.errors import InvalidRequest
from frontend.harmony.conversation import (
    FUNCTIONS,
    AssistantTurn,
    Instructions,
    ToolCall,
    ToolResult,
    Turn,
    UserTurn,
)
from frontend.http.answer import ContentLogprob
from frontend.http.body import convert
from frontend.turn.fields import NUMBER, TEXT, TEXTS, ClientTool, Part, left_out, text_of_part
from frontend.turn.ids import new_id
from frontend.turn.seal import Seal
from frontend.turn.thoughts import joined

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Phase = Literal["commentary", "final_answer"]


TextType = Literal["input_text", "output_text", "reasoning_text", "summary_text"]


class TextPart(msgspec.Struct, kw_only=True):
    """Text of the client, or of the model: as `output_text`, whose `annotations` are always empty, as
    reasoning, or as its summary, which is the full text."""

    type: TextType
    text: str = ""
    annotations: list[Any] | UnsetType = UNSET
    logprobs: list[ContentLogprob] | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.type == "output_text":
            self.annotations, self.logprobs = self.annotations or [], self.logprobs or []


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message; the content of a stored one is a list. `phase` tells preambles from the answer."""

    id: str = ""
    role: Literal["user", "assistant", "system", "developer"]
    status: ItemStatus = "completed"
    content: str | list[TextPart]
    phase: Phase | UnsetType = UNSET


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning: in `content`, or in `summary` if requested; sealed in `encrypted_content`."""

    id: str = ""
    summary: list[TextPart] = []
    content: list[TextPart] = []
    encrypted_content: str | UnsetType = UNSET
    status: ItemStatus = "completed"


class CallPart(msgspec.Struct, kw_only=True, tag_field="type"):
    """What calls and most results have."""

    id: str = ""
    call_id: str
    status: ItemStatus = "completed"


class FunctionCallItem(CallPart, kw_only=True, tag="function_call"):
    """A function call that the model requests; `arguments` is the text that it wrote."""

    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class CustomCallItem(CallPart, kw_only=True, tag="custom_tool_call"):
    """A custom tool call that the model requests; `input` is the text that it wrote."""

    name: str
    input: str
    namespace: str | UnsetType = UNSET


class FunctionOutputItem(CallPart, kw_only=True, tag="function_call_output"):
    """The result of a function call."""

    output: str | list[TextPart]


class CustomOutputItem(FunctionOutputItem, kw_only=True, tag="custom_tool_call_output"):
    """The result of a custom tool call."""


class LocalShellAction(msgspec.Struct, kw_only=True):
    """One command with its arguments."""

    command: list[str]
    type: Literal["exec"] = "exec"
    env: dict[str, str] | None = {}
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class ShellAction(msgspec.Struct, kw_only=True):
    """Shell commands that run one after the other."""

    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


class PatchOperation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The change to one file."""

    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | None = None


class LocalShellCallItem(CallPart, kw_only=True, tag="local_shell_call"):
    """A call of `local_shell`."""

    action: LocalShellAction


class ShellCallItem(CallPart, kw_only=True, tag="shell_call"):
    """A call of `shell`."""

    action: ShellAction


class PatchCallItem(CallPart, kw_only=True, tag="apply_patch_call"):
    """A call of `apply_patch`."""

    operation: PatchOperation


class LocalShellOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="local_shell_call_output"):
    """The output of a command. `id` is that of the call; some clients send `call_id` instead."""

    output: str
    id: str = ""
    call_id: str | None = None


class ShellOutputItem(CallPart, kw_only=True, tag="shell_call_output"):
    """The output and outcome of each command."""

    output: str | list[dict[str, Any]]


class PatchOutputItem(msgspec.Struct, kw_only=True, tag_field="type", tag="apply_patch_call_output"):
    """Whether a patch was applied, and its log."""

    call_id: str
    status: str = "completed"
    output: str | None = None
    id: str = ""


class ToolSearchCallItem(CallPart, kw_only=True, tag="tool_search_call"):
    """A call of a `tool_search` that the client runs."""

    arguments: dict[str, Any]
    execution: Literal["client"] = "client"


class ToolSearchOutputItem(CallPart, kw_only=True, tag="tool_search_output"):
    """The tools that a search has found, which the model may call from then on."""

    tools: list[dict[str, Any]]
    execution: Literal["client"] = "client"


MachineCallItem = LocalShellCallItem | ShellCallItem | PatchCallItem | ToolSearchCallItem
MachineOutputItem = LocalShellOutputItem | ShellOutputItem | PatchOutputItem | ToolSearchOutputItem
WrittenItem = MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem
CallItem = FunctionCallItem | CustomCallItem | MachineCallItem
OutputItem = WrittenItem | MachineCallItem
Item = OutputItem | FunctionOutputItem | CustomOutputItem | MachineOutputItem


class Reference(msgspec.Struct, kw_only=True):
    """A reference to an item of a stored response."""

    id: str


class MachineTool(NamedTuple):
    """A tool of OpenAI's that the client runs. The model sees it as a function; its calls are items of a type
    of their own, whose field `arguments` has the function's."""

    tool: ClientTool
    item: type[MachineCallItem]
    arguments: str


MACHINE_TOOLS: Mapping[str, MachineTool] = {
    "local_shell": MachineTool(
        ClientTool(
            "Runs one command on the user's machine.",
            {"command": TEXTS, "working_directory": TEXT, "timeout_ms": NUMBER},
            ["command"],
        ),
        LocalShellCallItem, "action",
    ),
    "shell": MachineTool(
        ClientTool(
            "Runs shell commands on the user's machine, one after the other.",
            {"commands": TEXTS, "timeout_ms": NUMBER, "max_output_length": NUMBER},
            ["commands"],
        ),
        ShellCallItem, "action",
    ),
    "apply_patch": MachineTool(
        ClientTool(
            "Creates, updates or deletes a file. A diff's lines begin with a space, + or -; @@ parts them.",
            {
                "type": TEXT | {"enum": ["create_file", "update_file", "delete_file"]},
                "path": TEXT,
                "diff": TEXT,
            },
            ["type", "path"],
        ),
        PatchCallItem, "operation",
    ),
    "tool_search": MachineTool(
        ClientTool("Finds tools by what they do, which can be called then.", {"query": TEXT}, ["query"]),
        ToolSearchCallItem, "arguments",
    ),
}  # fmt: skip


def machine_call(
    name: str, call_id: str, arguments: str, *, is_cut: bool = False
) -> MachineCallItem | FunctionCallItem:
    """The call as an item of the tool's type; as a function call if it is cut, since a patch cannot be
    incomplete, or if its arguments are invalid, which happens only without constrained decoding."""
    _, item, field = MACHINE_TOOLS[name]
    if not is_cut:
        try:
            fields = {field: msgspec.json.decode(arguments), "call_id": call_id, "id": new_id("item")}
            return msgspec.convert(fields, item)
        except (msgspec.DecodeError, RecursionError):
            pass
    status: ItemStatus = "incomplete" if is_cut else "completed"
    return FunctionCallItem(id=new_id("fc"), call_id=call_id, name=name, arguments=arguments, status=status)


INPUT_ITEMS: Mapping[str, type[msgspec.Struct]] = {
    **{item.__struct_config__.tag: item for item in get_args(Item)},
    "item_reference": Reference,
}
# Items made by OpenAI's hosted tools or by other models, which agents send back when a session moves.
LEFT_OUT = frozenset(
    {
        "web_search_call", "file_search_call", "computer_call", "computer_call_output",
        "image_generation_call", "code_interpreter_call", "mcp_list_tools", "mcp_approval_request",
        "mcp_approval_response", "mcp_call", "compaction", "compaction_summary", "configuration_update",
        "program", "program_output",
    }
)  # fmt: skip
_SEARCHES = frozenset({"tool_search_call", "tool_search_output"})  # OpenAI's servers run some of them
ADDITIONAL_TOOLS = "additional_tools"
"""An item with tools instead of content, as Codex sends them: see `offered_tools`."""
_KINDS = frozenset({*INPUT_ITEMS, *LEFT_OUT, ADDITIONAL_TOOLS})


class Texts(NamedTuple):
    """How items of a kind hold text: the prefix of their ids and the field. Then, if the model writes it: the
    prefix of its events, and of text in a part the type, its events' prefix, and the field with its index."""

    prefix: str
    field: str
    event: str = ""
    part: TextType | None = None
    part_event: str = "response.content_part"
    index_field: str = "content_index"


# These are complete, whatever `status` they come back with.
TEXTS_OF: Mapping[str, Texts] = {
    "message": Texts("msg", "content", "response.output_text", "output_text"),
    "reasoning": Texts("rs", "content", "response.reasoning_text", "reasoning_text"),
    "function_call": Texts("fc", "arguments", "response.function_call_arguments"),
    "function_call_output": Texts("fco", "output"),
    "custom_tool_call": Texts("ctc", "input", "response.custom_tool_call_input"),
    "custom_tool_call_output": Texts("ctco", "output"),
}


class InputReader:
    """The items of one body's `input`, each with an id; `left_out` are the paths of unsupported content."""

    def __init__(self, body_input: str | list[dict[str, Any]] | None, seal: Seal) -> None:
        """Raises InvalidRequest."""
        self.left_out: set[str] = set()
        self._seal = seal
        if isinstance(body_input, str):
            body_input = [{"role": "user", "content": body_input}]
        read = (self._read(item, f"input[{i}]") for i, item in enumerate(body_input or ()))
        self.items = [item for item in read if item is not None]

    def _read(self, fields: dict[str, Any], path: str) -> Item | Reference | None:
        kind = fields.get("type")
        if kind is None:  # optional for these two
            kind = "message" if "role" in fields else "item_reference"
        if not isinstance(kind, str) or kind not in _KINDS:
            allowed = ", ".join(sorted(_KINDS - LEFT_OUT))
            raise InvalidRequest(
                f"`{path}.type` {kind!r:.80} is not supported; allowed values: {allowed}.",
                param=f"{path}.type",
            )
        if kind == ADDITIONAL_TOOLS:
            return None
        is_of_server = fields.get("execution") == "server" or fields.get("call_id") is None
        if kind in LEFT_OUT or (kind in _SEARCHES and is_of_server):
            self.left_out.add(f"input[].{kind}")
            return None
        # OpenAI's types allow null for absent fields.
        fields = {name: value for name, value in fields.items() if value is not None}
        texts = TEXTS_OF.get(kind)
        if texts is not None:
            fields.pop("status", None)
            self._read_texts(fields, kind, texts.field, path)
        item: Any = convert(fields, INPUT_ITEMS[kind], path)
        if isinstance(item, ReasoningItem):
            item = self._reasoning(item, path)
        item.id = item.id or new_id("item" if texts is None else texts.prefix)
        return cast("Item | Reference", item)

    def _read_texts(self, fields: dict[str, Any], kind: str, field: str, path: str) -> None:
        """Replace content parts by parts of the item's own type, or by notes about what cannot be read."""
        part_type: TextType = "reasoning_text" if kind == "reasoning" else "input_text"
        content = fields.get(field)
        if kind == "message":
            part_type = "output_text" if fields.get("role") == "assistant" else part_type
            content = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if isinstance(content, list):
            read = (self._text(part, f"{path}.{field}[{i}]") for i, part in enumerate(content))
            fields[field] = [TextPart(type=part_type, text=text) for text in read]
        if kind == "reasoning" and isinstance(fields.get("summary"), list):
            parts = (convert(part, Part, f"{path}.summary[{i}]") for i, part in enumerate(fields["summary"]))
            fields["summary"] = [TextPart(type="summary_text", text=part.text or "") for part in parts]

    def _text(self, part: object, path: str) -> str:
        read = convert(part, Part, path)
        text = text_of_part(read, path)
        if text is None:
            self.left_out.add(f"input[].{read.type}"[:80])
            return left_out(read.type)
        return text

    def _reasoning(self, item: ReasoningItem, path: str) -> ReasoningItem:
        """The item with its `content`, or with its `encrypted_content` of this service."""
        content = item.content
        if not content:
            sealed, where = item.encrypted_content or "", f"{path}.encrypted_content"
            text = self._seal.open(sealed, where)
            if sealed and text is None:
                self.left_out.add("input[].encrypted_content")
            content = [] if text is None else [TextPart(type="reasoning_text", text=text)]
        if not content and item.summary:
            self.left_out.add("input[].summary")
        return ReasoningItem(id=item.id, content=content)


def turns(earlier: Iterable[Item], items: Iterable[Item]) -> Iterable[Turn]:
    """The items of previous responses, and those of `input`, as turns."""
    before = [_turn(item, "previous_response_id") for item in earlier]
    return joined([*before, *(_turn(item, f"input[{i}]") for i, item in enumerate(items))])


def _turn(item: Item, path: str) -> Turn:
    if isinstance(item, CallItem):
        return AssistantTurn(tool_calls=(_call(item),))
    match item:
        case ReasoningItem():
            return AssistantTurn(reasoning=_text(item.content or item.summary) or None)
        case MessageItem():
            return _message(item)
        case LocalShellOutputItem(call_id=None):
            return ToolResult(call_id=item.id, text=item.output, path=f"{path}.id")
        case _:
            return ToolResult(call_id=item.call_id or "", text=_result(item), path=f"{path}.call_id")


def _message(item: MessageItem) -> Turn:
    text = _text(item.content)
    match item.role:
        case "user":
            return UserTurn(text)
        case "assistant" if item.phase == "commentary":
            return AssistantTurn(preamble=text or None)
        case "assistant":
            return AssistantTurn(text=text or None)
        case _:
            return Instructions(text)


def _call(item: CallItem) -> ToolCall:
    if isinstance(item, FunctionCallItem | CustomCallItem):
        return ToolCall(
            call_id=item.call_id,
            name=item.name,
            arguments=item.input if isinstance(item, CustomCallItem) else item.arguments,
            takes_text=isinstance(item, CustomCallItem),
            namespace=item.namespace or FUNCTIONS,
        )
    name, machine = next((n, m) for n, m in MACHINE_TOOLS.items() if isinstance(item, m.item))
    fields: dict[str, Any] = msgspec.to_builtins(getattr(item, machine.arguments))
    # A client may give `tool_search` other parameters.
    names = fields if name == "tool_search" else machine.tool.properties
    arguments = {key: fields[key] for key in names if fields.get(key) is not None}
    return ToolCall(call_id=item.call_id, name=name, arguments=msgspec.json.encode(arguments).decode())


def _text(parts: str | Iterable[TextPart]) -> str:
    return parts if isinstance(parts, str) else "".join(part.text for part in parts)


def _result(item: FunctionOutputItem | MachineOutputItem) -> str:
    match item:
        case ToolSearchOutputItem():
            return f"Found: {', '.join(_names(item.tools)) or 'nothing'}"
        case PatchOutputItem():
            return item.output or item.status
        case ShellOutputItem(output=list(outputs)):
            return msgspec.json.encode(outputs).decode()
        case FunctionOutputItem(output=parts):
            return _text(parts)
        case LocalShellOutputItem(output=text) | ShellOutputItem(output=text):
            return str(text)


def _names(tools: Iterable[dict[str, Any]], prefix: str = "") -> Iterator[str]:
    for tool in tools:
        name = f"{prefix}{tool.get('name', tool.get('type'))}"
        inner = tool.get("tools")
        yield from _names(inner, f"{name}.") if inner else [name]
