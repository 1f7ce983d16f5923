"""The OpenAPI document as a page for people, with nothing from other hosts."""

import html
import json
from collections.abc import Iterator
from typing import Any

_STYLE = "body{font:16px sans-serif;max-width:60em;margin:2em auto}pre{background:#eee;padding:1em}"


def reference_page(document: dict[str, Any]) -> str:
    """HTML of all operations: what each is for, an example, and the schema of its body."""
    title = html.escape(document["info"]["title"])
    operations = "".join(_operations(document))
    return (
        f"<!doctype html><meta charset='utf-8'><title>{title}: API</title><style>{_STYLE}</style>"
        f"<h1>{title}: API</h1><p>The same as data: <a href='openapi.json'>openapi.json</a></p>{operations}"
    )


def _operations(document: dict[str, Any]) -> Iterator[str]:
    schemas = document["components"]["schemas"]
    for path, item in document["paths"].items():
        for method, operation in item.items():
            if method != "parameters":
                yield f"<h2>{method.upper()} {html.escape(path)}</h2>"
                yield f"<p>{html.escape(operation['summary'])}</p>"
                yield from _body(path, operation.get("requestBody"), schemas)


def _body(path: str, body: dict[str, Any] | None, schemas: dict[str, Any]) -> Iterator[str]:
    if body is None:
        return
    content = body["content"]["application/json"]
    example = html.escape(json.dumps(content["example"]))
    yield f"<pre>curl http://HOST:PORT{path} -H 'Content-Type: application/json' -d '{example}'</pre>"
    schema = schemas[content["schema"]["$ref"].rpartition("/")[2]]
    yield f"<p>{html.escape(schema['description'])}</p>"
    text = html.escape(json.dumps(schema, indent=2))
    yield f"<details><summary>schema</summary><pre>{text}</pre></details>"
