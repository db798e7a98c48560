"""From patterns, folders, manifests and TFRecord shards to encoded images."""
