"""The errors of the double's AsyncLLM."""


class EngineDeadError(Exception):
    """The engine core is dead."""

    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above) for the root cause.")
