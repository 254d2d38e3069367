"""The training loop: engine, trainer, and what they report."""
