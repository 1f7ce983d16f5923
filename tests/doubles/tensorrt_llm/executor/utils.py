"""The errors of the double's executor."""


class RequestError(RuntimeError):
    """One request failed; the engine keeps running."""


class CppExecutorError(RuntimeError):
    """The engine failed."""
