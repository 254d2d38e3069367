"""Solvers: the choice of shapes of greatest utility within the capacity."""
