"""What the loop is asked to do, and how all processes come to do it at the same step.

Requests are posted from any thread (the tuner's verdict, a signal, a hook). In one process the loop
takes them at its next step. In several, each process sends its own requests as a small vector with
the reduction of a step; the sum is known to everyone before step + `DEPTH` is dispatched, and takes
effect there: no further message, no further collective, and never a different answer.
"""

import threading
from dataclasses import dataclass

import numpy as np

# A step is dispatched once the step this many before it is done: one runs, one waits behind it.
DEPTH = 2
CONTROL_SIZE = 8


@dataclass(frozen=True, kw_only=True)
class Control:
    """What to do before the next step."""

    stop: bool = False
    finish: bool = False  # end as if complete
    save: bool = False
    evaluate: bool = False
    micro_batch_size: int | None = None
    num_micro_batches: int | None = None
    strategy: str | None = None  # of that batch; in one process
    statistics_every: int | None = None
    num_ready: int = 0  # sizes compiled or refused, summed over processes


class Requests:
    """A mailbox of things to do; the latest wish of each kind wins."""

    def __init__(self):
        self._lock = threading.Lock()
        self._wish = Control()
        self.signal: str | None = None  # what asked to stop, for the record

    def post(self, **wishes: object) -> None:
        """Ask for something: any field of `Control`."""
        with self._lock:
            self._wish = Control(**{**vars(self._wish), **wishes})  # pyright: ignore[reportArgumentType]

    def interrupt(self, signal: str) -> None:
        """Ask to save and stop. Safe inside a signal handler: takes no lock."""
        self.signal = signal

    def take(self, *, num_ready: int = 0) -> Control:
        """All wishes since the last call."""
        with self._lock:
            wish, self._wish = self._wish, Control()
        fields = {**vars(wish), "num_ready": num_ready}
        if self.signal is not None:
            fields["stop"] = True
        return Control(**fields)


def encode(control: Control) -> np.ndarray:
    """The vector that is summed over processes, float32 `[CONTROL_SIZE]`."""
    return np.asarray(
        [
            control.stop,
            control.finish,
            control.save,
            control.evaluate,
            control.micro_batch_size or 0,
            control.num_micro_batches or 0,
            control.statistics_every or 0,
            control.num_ready,
        ],
        np.float32,
    )


def decode(total: np.ndarray) -> Control:
    """The agreed control. Configurations come from process 0 alone, so their sum is theirs."""
    stop, finish, save, evaluate, micro, count, every, ready = (int(round(float(x))) for x in total)
    return Control(
        stop=stop > 0,
        finish=finish > 0,
        save=save > 0,
        evaluate=evaluate > 0,
        micro_batch_size=micro or None,
        num_micro_batches=count or None,
        statistics_every=every or None,
        num_ready=ready,
    )
