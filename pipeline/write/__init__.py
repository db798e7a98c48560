"""From records to files."""
