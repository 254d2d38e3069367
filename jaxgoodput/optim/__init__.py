"""What an optax user takes without the rest: noise estimators, rules, `adaptive`."""
