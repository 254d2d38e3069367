"""What a restart costs is learned from the job's own: what was told counts less than one that happened."""

from collections.abc import Sequence


def estimated_restart_s(told_s: float, took_s: Sequence[float]) -> float:
    """Seconds that the next restart of a job will take: the median of what is known.

    told_s: what its user or its size suggests, one voice; took_s: seconds that its restarts took until it
    worked again, its first start among them, two voices each. So one of them is enough to overrule what was
    told, a single one that took far too long does not count once there are three (with two, what was told
    decides between them), and numbers that agree are returned to the bit.

    >>> estimated_restart_s(150.0, ())
    150.0
    >>> estimated_restart_s(150.0, (31.0, 29.0, 400.0))
    31.0
    """
    voices = sorted([told_s, *took_s, *took_s])
    return voices[len(voices) // 2]
