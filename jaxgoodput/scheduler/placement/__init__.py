"""From shapes to devices."""
