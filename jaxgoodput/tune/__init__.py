"""What next, and why: verdicts on the batch and the strategy."""
