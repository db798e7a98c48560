"""Files, local or on object storage."""
