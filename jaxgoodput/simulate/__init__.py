"""The scheduler's own decisions in simulated time."""
