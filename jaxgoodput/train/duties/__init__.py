"""What the loop does besides stepping: saving, evaluating, changing the batch."""
