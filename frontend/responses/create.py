"""`POST /v1/responses`: from the body, and what it continues, to the answer that can be begun."""

from frontend.harmony.conversation import Conversation
from frontend.http.body import decode
from frontend.http.services import Services
from frontend.responses.answer import ResponseAnswer
from frontend.responses.body import SEALED, ResponseBody
from frontend.responses.events import EventWriter
from frontend.responses.given import InputReader
from frontend.responses.history import history, resolved
from frontend.responses.object import begun, summary_of
from frontend.responses.output import OutputShape, OutputWriter
from frontend.responses.request import check_served, not_enforced, turn_request
from frontend.responses.runs import ResponseState
from frontend.responses.tools import offered_tools
from frontend.turn.prepare import LONG_BYTES, prepare
from frontend.turn.request import Asker
from frontend.turn.seal import Seal


async def prepare_response(
    raw: bytes, asker: Asker, services: Services, state: ResponseState, seal: Seal
) -> ResponseAnswer:
    """An answer that can be begun. Raises the BatonError that refuses the body."""
    body, unknown = decode(raw, ResponseBody)
    check_served(body)
    served = services.fleet.served(body.model)
    reader = InputReader(seal)
    items = [await resolved(item, i, state.store) for i, item in enumerate(reader.read(body.input))]
    previous_id = body.previous_response_id
    earlier = [] if previous_id is None else await history(previous_id, state)
    offered = offered_tools(body)
    # What came before may be long, whatever the body's length.
    request = turn_request(body, offered, earlier, items, len(raw) + (LONG_BYTES if earlier else 0))
    (choice,) = await prepare(request, asker, served, services.thoughts, max_choices=1)
    shape = OutputShape(
        tools={tool.called: tool for tool in offered.tools},
        as_summary=summary_of(body) is not None,
        seal=seal if SEALED in (body.include or ()) else None,
    )
    writer = EventWriter() if body.stream else None
    assert isinstance(request.prompt, Conversation), "a response is never raw text"
    return ResponseAnswer(
        begun(body, request.prompt.reasoning_effort),
        items,
        choice,
        output=OutputWriter(choice, served.tokenizer, shape, writer),
        writer=writer,
        store=state.store,
        ignored=(*unknown, *sorted(reader.left_out), *not_enforced(body, offered)),
    )
