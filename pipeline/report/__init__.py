"""The report pages of runs, reconciliations and evaluations."""
