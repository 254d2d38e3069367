"""Questions about a task that are answered before it is trained: would a strategy fit, would adapting pay."""
