"""What tests of models share."""

from typing import Any

import pytest

_NO_CREDENTIALS = "from apache_beam.internal.gcp import auth\nauth._Credentials._credentials_init = True\n"


@pytest.fixture
def versions_bucket(gcs_bucket: Any, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A bucket of the storage emulator; the process that prepares a version does not look for credentials, for 25 s, either."""
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(_NO_CREDENTIALS, encoding="utf-8")
    monkeypatch.syspath_prepend(site)
    return gcs_bucket
