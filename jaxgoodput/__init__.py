"""Adaptive, elastic training in JAX."""
