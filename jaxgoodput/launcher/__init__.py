"""One job in several processes."""
