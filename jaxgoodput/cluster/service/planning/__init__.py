"""Plans for a real cluster: the tables of jobs, the decision, and the processes that make it."""
