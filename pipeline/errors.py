"""One error class for each way in which a job cannot start or go on because of what the user gave it.

Each message is one line: what was expected, what came, what to do. `pipeline.run` prints it and exits with 2,
or with 3 where another run is in the way.
"""


class UserError(Exception):
    """Something the user gave cannot work; the message says what to change."""


class ConfigError(UserError):
    """The config file or a flag is wrong."""


class InputError(UserError):
    """An input names nothing that can be read."""


class OutputError(UserError):
    """The output place cannot be written."""


class ModelError(UserError):
    """The model is missing, or is no detector that the pipeline can run."""


class RunnerError(UserError):
    """The chosen runner is not there or cannot run this job."""


class BusyError(UserError):
    """Another run works at the same images for the same results folder."""


class TakenOverError(UserError):
    """Another run took over what this one worked at, since nothing was heard of it."""
