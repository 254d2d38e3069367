"""Gavel's policies: fractions of time, and rounds that realise them."""
