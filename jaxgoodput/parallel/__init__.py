"""Plans for placing a model on devices."""
