"""The two halves of a connector."""

import enum


class KVConnectorRole(enum.Enum):
    """Which half: beside the scheduler, or in a GPU worker."""

    SCHEDULER = 0
    WORKER = 1
