"""What runs on a node: its agent, the processes of jobs, and what their journals tell."""
