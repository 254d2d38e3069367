"""Many jobs on one cluster: policies, placement, and a simulator around the same `reconcile`."""
