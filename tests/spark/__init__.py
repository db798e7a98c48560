"""A batch job on Spark: `make test-spark`."""
