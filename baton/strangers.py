"""What strangers sent to this process: ignored, counted, and logged once a minute."""

import logging
import math
import time

log = logging.getLogger(__name__)

_LOG_EVERY_S = 60.0


class Strangers:
    """Counts messages that no process of Baton's sent."""

    def __init__(self) -> None:
        self.num_messages = 0
        self._logged_s = -math.inf

    def note(self, place: str) -> None:
        """Count a message that came to `place`."""
        self.num_messages += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now_s
            log.warning("strange_messages=%d last=%s", self.num_messages, place)


strangers = Strangers()
"""This process's."""
