"""Tools that an API defines and the client runs, such as `shell`: functions for the model."""

from collections.abc import Mapping, Sequence

import msgspec

from frontend.harmony.conversation import Tool

TEXT = {"type": "string"}
TEXTS = {"type": "array", "items": TEXT}
NUMBER = {"type": "integer"}


class ClientTool(msgspec.Struct, frozen=True):
    """`properties` are the schemas of the arguments, as the API documents them."""

    description: str
    properties: Mapping[str, object]
    required: Sequence[str]

    def function(self, name: str, path: str) -> Tool:
        """The function of that name; its arguments are enforced."""
        parameters = {"type": "object", "properties": self.properties, "required": self.required}
        return Tool(name=name, description=self.description, parameters=parameters, strict=True, path=path)
