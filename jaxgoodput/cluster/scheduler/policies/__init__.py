"""The scheduler's own policy, and the parts that policies of shapes are made of."""
