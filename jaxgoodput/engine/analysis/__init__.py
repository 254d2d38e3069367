"""What a compiled program does, read from its text before it has run: arithmetic, traffic, memory."""
