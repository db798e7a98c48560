"""Jobs on a Flink cluster of this machine: `make test-flink`; not among those of `make test`."""
