"""Questions about a task before it is trained (would a strategy fit, would adapting pay), and `Tuner`.

`Tuner` answers a loop of the user's own, which asks for the next batch.
"""
