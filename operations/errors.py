"""Why a command ends early; and text that changes nothing on a terminal."""


def printable(text: str) -> str:
    """With escapes in place of control characters, which clients may put into ids."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


class CommandError(Exception):
    """The message is a sentence for the operator."""

    def __init__(self, text: str, *, exit_status: int = 2) -> None:
        super().__init__(printable(text))
        self.exit_status = exit_status


class FrontendError(CommandError):
    """No frontend answers (`status` 0), or one answers with an error."""

    def __init__(self, text: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.code = printable(code)
