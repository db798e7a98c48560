"""The report pages of runs and reconciliations."""
