"""What the Flex Template's launcher runs: `pipeline.run`, which writes the job to `--template_location`.

A template's parameters come as `--name=value`, with underscores, and switches as `true` and `false`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from pipeline.config import settings
from pipeline.run import main


def to_flags(parameters: Iterable[str]) -> Iterator[str]:
    """The command line's own flags; what is no setting goes to Beam as it is."""
    ours = {setting.flag.replace("-", "_")[2:]: setting for setting in settings()}
    for parameter in parameters:
        name, equals, value = parameter.partition("=")
        setting = ours.get(name.removeprefix("--"))
        if setting is None:
            yield parameter
        elif setting.schema.get("type") == "boolean":
            yield setting.flag if value == "true" else setting.flag.replace("--", "--no-", 1)
        else:
            yield setting.flag + equals + value


if __name__ == "__main__":
    sys.exit(main(list(to_flags(sys.argv[1:]))))
