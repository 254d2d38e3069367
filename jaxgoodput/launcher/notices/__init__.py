"""Notices that this host is about to be taken away, and who is asked for them."""
