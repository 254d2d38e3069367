"""Checkpoints of a run: written, kept, found and read."""
