"""Readers of traces that say when jobs came, on how many devices and for how long they ran, and no more."""
