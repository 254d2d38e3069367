"""What a real cluster adds to a simulated one: faults, what changes cost, and what feeds the jobs."""
