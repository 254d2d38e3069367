"""Simulated jobs: what applications really do (`gavel`, `model`, `tables`), and what the simulator tracks."""
