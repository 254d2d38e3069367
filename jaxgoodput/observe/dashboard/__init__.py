"""What a run writes for TensorBoard: curves, verdicts and pictures."""
