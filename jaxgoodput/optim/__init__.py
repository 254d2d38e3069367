"""Tools for any optax training loop: noise estimators, learning-rate rules, `adaptive`."""
