"""`POST /v1/responses`: from the body, and what it continues, to the answer that can be begun."""

from frontend.harmony.conversation import Conversation
from frontend.http.body import decode
from frontend.http.services import Services
from frontend.responses.answer import ResponseAnswer
from frontend.responses.body import ResponseBody
from frontend.responses.events import EventWriter
from frontend.responses.history import history, resolved
from frontend.responses.items import read_input
from frontend.responses.object import begun
from frontend.responses.output import OutputWriter
from frontend.responses.request import check_served, turn_request
from frontend.responses.runs import ResponseState
from frontend.turn.prepare import LONG_BYTES, prepare
from frontend.turn.request import Asker


async def prepare_response(
    raw: bytes, asker: Asker, services: Services, state: ResponseState
) -> ResponseAnswer:
    """An answer that can be begun. Raises the BatonError that refuses the body."""
    body, unknown = decode(raw, ResponseBody)
    check_served(body)
    served = services.fleet.served(body.model)
    items = [await resolved(item, i, state.store) for i, item in enumerate(read_input(body.input))]
    previous_id = body.previous_response_id
    earlier = [] if previous_id is None else await history(previous_id, state)
    # What came before may be long, whatever the body's length.
    request = turn_request(body, earlier, items, len(raw) + (LONG_BYTES if earlier else 0))
    (choice,) = await prepare(request, asker, served, services.thoughts, max_choices=1)
    assert isinstance(request.prompt, Conversation), "a response is never raw text"
    writer = EventWriter() if body.stream else None
    output = OutputWriter(choice, served.tokenizer, writer)
    response = begun(body, request.prompt.reasoning_effort)
    return ResponseAnswer(
        response, items, choice, output=output, writer=writer, store=state.store, ignored=unknown
    )
