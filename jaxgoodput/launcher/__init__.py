"""Runs one job as several processes, on one host or many."""
