"""Pollux goodput: pure maths of throughput, statistical efficiency and their product."""
