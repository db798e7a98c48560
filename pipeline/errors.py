"""The errors of users: one class for each thing that a user gives or that stops a run.

Each message is one line: what was expected, what came, what to do. `pipeline.run` prints it and exits with 2; it exits with 3 if
another run is in the way, and with 1 if the disk is full or a store is away.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable


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


def run_command(work: Callable[[], int], failed: str, stopped: str = "stopped", failed_code: int = 1) -> int:
    """Runs the work of a command line. SIGTERM stops it as Ctrl-C does; an error is one line on standard error.

    Args:
      work: The work; returns an exit code.
      failed: The beginning of the line for an error that is not the user's, such as any of storage.
      stopped: The line where the work is stopped.
      failed_code: The exit code of such an error.

    Returns:
      The exit code; 2: an error of the user's; 3: another run is in the way; 130: stopped.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return work()
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr)
        return 128 + signal.SIGINT
    except BusyError as err:
        code, line = 3, str(err).partition("; --when-busy")[0]
    except UserError as err:
        code, line = 2, str(err)
    except Exception as err:  # noqa: BLE001  whatever storage says, the user gets one line
        code, line = failed_code, f"{failed}: {' '.join(str(err).split())[:500]}"
    from models.progress import printable

    print(f"error: {printable(line)}", file=sys.stderr)
    return code
