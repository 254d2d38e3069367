"""What runs on a node: its agent, the processes of jobs, and the reader of their journals."""
