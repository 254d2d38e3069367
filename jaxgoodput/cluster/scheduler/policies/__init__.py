"""Policies: frozen dataclasses that turn jobs and a cluster into a decision."""
