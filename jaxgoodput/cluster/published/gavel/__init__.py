"""Gavel's policies (Narayanan et al., OSDI 2020): fractions of time, and rounds that realise them."""
