"""The results folder: its layout, shards and their rows, keys, locks, which row counts, compaction."""
