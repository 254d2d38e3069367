"""A training step as a value: its programs, and the engine that compiles and runs them."""
