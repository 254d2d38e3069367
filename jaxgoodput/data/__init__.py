"""The elastic input pipeline: which sample goes where, exactly once."""
