"""The optimisation problems behind the policies."""
