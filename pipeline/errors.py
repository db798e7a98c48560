"""The errors of users: one class for each thing that a user gives or that stops a run.

Each message is one line: what was expected, what came, what to do. `pipeline.run` prints it and exits with 2; it exits with 3 if
another run is in the way.
"""


class UserError(Exception):
    """The user must change something; the message names it."""


class ConfigError(UserError):
    """The config file or a flag is wrong."""


class InputError(UserError):
    """An input names nothing readable."""


class OutputError(UserError):
    """The output cannot be written."""


class ModelError(UserError):
    """The model is missing, or is no detector that the pipeline can run."""


class RunnerError(UserError):
    """The runner cannot be reached, or cannot run this job."""


class BusyError(UserError):
    """Another run works at the same images for the same results folder."""


class TakenOverError(UserError):
    """Another run took over this one's images, since this one showed no sign of life."""
