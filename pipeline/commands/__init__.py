"""The verbs of `detect-objects`, a module each with its `main(arguments)`; none calls another. `pipeline.run` is that of jobs."""
