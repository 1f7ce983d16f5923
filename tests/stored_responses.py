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
def another_frontend(path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that claims the response `theirs`; killed at the end."""
    process = subprocess.Popen([sys.executable, "-c", OTHER_FRONTEND, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        try:
            assert process.stdout.readline() == b"saved\n"
            yield process
        finally:
            process.kill()
            process.wait()


def rows(path: Path, query: str) -> list[tuple[object, ...]]:
    """The file's rows, as another program reads them."""
    with closing(sqlite3.connect(path)) as db:
        return db.execute(query).fetchall()
