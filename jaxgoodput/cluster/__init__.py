"""Many jobs on one cluster: the scheduler, its simulator, and the service that runs it."""
