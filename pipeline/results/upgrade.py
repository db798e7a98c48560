"""Placeholder until `upgrade` is there."""


def refuse_old_files(output: str) -> None:
    """Refuses a folder with files of the release before."""
