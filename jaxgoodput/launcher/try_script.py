"""`jaxgoodput try SCRIPT`: would another batch train a script's model faster?"""

import sys
from collections.abc import Sequence
from typing import Any

from jaxgoodput.launcher.plan import reached


def try_script(script: str, arguments: Sequence[str], time_s: float) -> str:
    """Run a script up to its `fit()`, train for about `time_s` seconds there, and return what that says.

    Raises UsageError if the script cannot be run, or ends without a call of `fit()`.
    """
    from jaxgoodput.train.ask.tryout import tryout

    def answer(trainer: Any) -> str:
        print(
            f"trying batches of {type(trainer).__name__} for about {time_s:.0f} s, in a temporary folder",
            file=sys.stderr,
            flush=True,
        )
        return tryout(trainer, time_s=time_s).answer()

    # Inside the script, whose files and modules are still open.
    return reached(script, arguments, answer)
