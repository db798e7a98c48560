"""What a job leaves, on whichever machine its last steps run: rows, summary, report, and the outcome with its exit code."""
