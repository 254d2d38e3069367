"""Published schedulers and readers of their artifacts, to compare with; each file names its source."""
