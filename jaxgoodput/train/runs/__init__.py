"""Kinds of run: one process, a fixed set of processes, and processes that come and go."""
