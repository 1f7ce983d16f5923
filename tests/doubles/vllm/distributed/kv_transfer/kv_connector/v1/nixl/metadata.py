"""What workers tell each other on NIXL's side channel."""

import dataclasses

GET_META_MSG = b"get_meta_msg"


@dataclasses.dataclass
class NixlHandshakePayload:
    """The answer to GET_META_MSG; fields that the reader does not know are ignored."""

    compatibility_hash: str
    agent_metadata_bytes: bytes
