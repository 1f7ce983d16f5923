"""Logging: one `key=value` line per state change, to stderr."""

import logging
import sys
from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]


def configure_logging(level: LogLevel) -> None:
    """Send every record of this process to stderr as `time level logger message`."""
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(
        logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s", "%H:%M:%S")
    )
    logging.basicConfig(level=level.upper(), handlers=[stream], force=True)
    for noisy in ("httpx", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
