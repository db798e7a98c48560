"""How a job ends, on whichever machine its last step runs: the summary, the report, and the outcome with its exit code."""
