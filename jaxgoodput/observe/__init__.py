"""What a run tells: events, the journal, the dashboard, the terminal."""
