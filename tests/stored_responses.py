"""Shared parts of the response store tests: responses, another frontend, another reader."""

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from frontend.responses.store import StoredResponse

# Another process that claims a running response, reports it, and lives until it is killed.
OTHER_FRONTEND = """
import asyncio, sys
from frontend.responses import store
from tests.stored_responses import response
store.WAIT_S = 300  # "saved" means in the file, on a slow disk, too
async def main():
    theirs = store.ResponseStore(sys.argv[1], address="unix:@theirs")
    await theirs.save(response("theirs", status="in_progress", events=b"event: a"), [])
    print("saved", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def response(response_id: str, **fields: object) -> StoredResponse:
    given = {"status": "completed", "body": b'{"output":[]}', "items": b"[]", **fields}
    return StoredResponse(id=response_id, **given)  # type: ignore[arg-type]  # as the caller says


@contextmanager
def another_frontend(path: Path) -> Iterator[None]:
    """A process that claims the response `theirs`; killed at the end."""
    command = [sys.executable, "-c", OTHER_FRONTEND, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"saved\n"
            yield
        finally:
            process.kill()


def rows(path: Path, query: str) -> list[tuple[object, ...]]:
    """The file's rows, as another program reads them."""
    with closing(sqlite3.connect(path)) as db:
        return db.execute(query).fetchall()
