"""Hints for paths of OpenAI's and other servers that are not served: what is there instead."""

import re
from collections.abc import Container

COMPACT = "/v1/responses/compact"

_INSTEAD = {
    COMPACT: "Shorten `input`, or begin anew without `previous_response_id`.",
    "/v1/conversations(/.*)?": "Responses are stored: continue one with `previous_response_id`.",
    "/v1/(assistants|threads)(/.*)?": "Use /v1/responses.",
    "/v1/(messages/)?batches(/.*)?": "Send the requests at once; they are batched while they run.",
    "/v1/(files|uploads)(/.*)?": "Send the text in the request itself.",
    "/v1/(embeddings|images|audio|moderations|realtime)(/.*)?": "This server generates text only.",
    "/openai/(deployments/.*|v1/.*|responses(/.*)?)": "Azure's paths are not served: set the base URL to "
    "http://HOST:PORT/v1 and name the `model` in the body.",
}


def hint(path: str, served: Container[str]) -> str:
    """A sentence for an unknown path; empty if there is nothing to say. `served` are the known paths: the
    base URL may lack /v1, or have it twice."""
    meant = path.removeprefix("/v1") if path.startswith("/v1/") else f"/v1{path}"
    if meant in served:
        return f" Did you mean {meant}? Check the client's base URL."
    found = (
        sentence
        for pattern, sentence in _INSTEAD.items()
        if re.fullmatch(pattern, path) or re.fullmatch(pattern, f"/v1{path}")
    )
    return f" {next(found, '')}".rstrip()
