"""The input pipeline: reads every sample exactly once, whatever batches and processes do."""
