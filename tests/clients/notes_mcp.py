"""An MCP server over stdio, in plain JSON-RPC: its one tool reads a note of those in its first argument."""

import json
import sys
from typing import Any

NOTES = json.loads(sys.argv[1])
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TOOL = {"name": "read_note", "description": "Reads a note.", "inputSchema": SCHEMA}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    match method:
        case "initialize":
            info = {"name": "notes", "version": "1"}
            version = params["protocolVersion"]
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            return {"tools": [TOOL]}
        case "tools/call":
            return {"content": [{"type": "text", "text": NOTES[params["arguments"]["name"]]}]}
        case _:
            return {}


for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:  # else it is a notification
        result = answer(asked["method"], asked.get("params", {}))
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}) + "\n")
        sys.stdout.flush()
