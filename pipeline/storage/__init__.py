"""Names and places of files, local or on object storage."""
