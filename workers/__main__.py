"""`python -m workers`: runs one engine in one role."""

import asyncio
import logging
import sys
from pathlib import Path

from baton.files import UnsafeFolder
from baton.flags import parse
from baton.process import dying_at_once, end, leave_start_uncollected, run
from baton.telemetry import configure_logging, print_error
from workers.engines.build import build_engine, with_engine
from workers.flags import WorkerSettings, with_model_folder
from workers.settings import SettingsError
from workers.worker import run_worker

log = logging.getLogger("workers")


def main(argv: list[str]) -> int:
    """Exit status: 0 after a drain or a valid --check, 1 if the engine failed, 2 for invalid settings."""
    parsed = parse(WorkerSettings, argv, prog="python -m workers", description="One engine, one role.")
    settings = parsed.settings
    configure_logging(settings.log_level, settings.log_format)

    async def life(shutdown: asyncio.Event) -> int:
        try:
            settings.wires.check()
            complete = with_engine(with_model_folder(parsed))
            with dying_at_once():  # torch, say, takes seconds
                engine, lines = build_engine(complete)
            if not settings.check:
                clear(settings.ready_file)
        except (SettingsError, UnsafeFolder, ValueError) as error:
            print_error(error)
            return 2
        log.info("settings %s", ", ".join(complete.lines()) or "are the defaults")
        log.info("peers reach this worker at %s", settings.wires.address())
        log.info("engine settings %s", ", ".join(lines) or "are the defaults")
        if settings.check:
            return 0
        leave_start_uncollected()
        return await run_worker(complete.settings, engine, shutdown)

    return run(life)


def clear(path: Path | None) -> None:
    """Remove what an earlier process left there. Raises SettingsError if the file cannot be written."""
    try:
        if path is not None:
            path.touch()
            path.unlink()
    except OSError as error:
        raise SettingsError(f"--ready-file {path}: {error.strerror}") from error


if __name__ == "__main__":
    end(main(sys.argv[1:]))
