"""`python -m pipeline.config_schema`: writes the JSON Schema of the config file, for editors that complete and check YAML by it.

    python -m pipeline.config_schema > config.schema.json

A config names it in its first line: `# yaml-language-server: $schema=config.schema.json`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic import TypeAdapter

from pipeline.config import Config


def config_schema() -> dict[str, Any]:
    """The schema, in JSON Schema's dialect 2020-12. Relations between settings are none of its business."""
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, **TypeAdapter(Config).json_schema(), "title": "Config of a detection job"}


if __name__ == "__main__":
    json.dump(config_schema(), sys.stdout, indent=2)
    print()
