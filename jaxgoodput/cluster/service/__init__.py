"""The service that runs a real cluster: journal, plans, HTTP, agents and engines."""
