"""Models of other libraries as pure functions, for use in a `Trainer`."""
