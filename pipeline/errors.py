"""The errors of users: one class for each thing that a user gives or that stops a run.

Each message is one line: what was expected, what came, what to do. `pipeline.run` prints it and exits with 2; it exits with 3 if
another run is in the way, and with 1 if the disk is full or a store is away.
"""


class UserError(Exception):
    """The user must change something; the message names it."""


class ConfigError(UserError):
    """The config file or a flag is wrong."""


class InputError(UserError):
    """An input names nothing readable."""


class OutputError(UserError):
    """The output cannot be written."""


class FullError(OutputError):
    """The output's disk is full, or the user's quota of it: the command is right, and works once there is room."""


class StorageAwayError(UserError):
    """The store of the images has not answered for long: the command is right, and works once the store is back."""


class ModelError(UserError):
    """The model is missing, or is no detector that the pipeline can run."""


class RunnerError(UserError):
    """The runner cannot be reached, or cannot run this job."""


class BusyError(UserError):
    """Another run works at the same images for the same results folder."""


def exit_code_of(err: Exception, failed: str) -> tuple[int, str]:
    """The exit code of a command that ends by an error, and its line.

    Args:
      err: The error; any exception of storage may be one.
      failed: The beginning of the line for an error that is none of the user's.
    """
    if isinstance(err, BusyError):
        return 3, str(err).partition("; --when-busy")[0]
    if isinstance(err, UserError):
        return 2, str(err)
    return 1, f"{failed}: {' '.join(str(err).split())[:500]}"
