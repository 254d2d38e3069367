"""How runs are watched: events, hooks, the journal and reports from it, the dashboard, trackers."""
