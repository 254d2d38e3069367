"""Tables whose rows come and go while a run trains: what a task says of them, and their batches."""
