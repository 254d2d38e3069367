"""Many jobs on a real cluster: the journal, the plan, the HTTP service, the agents of nodes, the page."""
