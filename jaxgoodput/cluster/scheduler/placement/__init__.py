"""Placement: which devices of which nodes each job gets."""
