"""The cells that are refused, with a part of the sentence, and those that are known to be wrong still."""

from collections.abc import Mapping

ALL = "all columns"

# (row, column) -> part of the message. docs/exactness.md gives the reason of each.
REFUSED: Mapping[tuple[str, str], str] = {
    ("dpsgd", ALL): "needs one gradient per sample",
    ("sophia", ALL): "a Hessian",
    ("lookahead", ALL): "needs parameters of its own kind",
    ("MultiSteps", "8 x base"): "only in every k-th update",
    ("skip_large_updates", "8 x base"): "only in every k-th update",
    ("apply_every", "8 x base"): "only in every k-th update",
    ("sam", "8 x base"): "back and forth in turns",
    ("conditionally_transform", "8 x base"): "whose condition may count updates",
    ("counts, not declared", "2 replicas"): "adds up over samples",
    ("counts, not declared", "4 replicas"): "adds up over samples",
    ("counts, not declared", "8 x base"): "adds up over samples",
}

# (row, column) -> why the cell is neither equal nor refused yet.
OPEN: Mapping[tuple[str, str], str] = {}


def expected_refusal(row: str, column: str) -> str | None:
    """Return a part of the sentence that refuses a cell; None if the cell is not refused."""
    return REFUSED.get((row, column), REFUSED.get((row, ALL)))
