"""Decides on the next batch and strategy, with reasons: numbers in, verdicts out."""
