"""How a run ends other than well, and what the record says of it."""


class Preempted(SystemExit):
    """The run was asked to stop; its state is saved. Exit code 143: it wants a restart."""

    def __init__(self, step: int, signal_name: str):
        super().__init__(143)
        self.step = step
        self.signal_name = signal_name


class Diverged(RuntimeError):
    """Too many updates in a row had a loss or gradient that was not finite."""


def named(error: BaseException) -> str:
    """What the record says of an error: its class and its message."""
    return f"{type(error).__name__}: {error}"
