"""The report pages of runs and evaluations."""
