"""Statistics of a job: counting, merging, worker reports, progress display, summary."""
