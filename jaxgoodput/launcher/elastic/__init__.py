"""One job on hosts that come and go: a coordinator, an agent per host, and their workers."""
