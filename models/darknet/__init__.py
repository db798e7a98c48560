"""Darknet: cfg and weights files, and their network as a `tf.Module`; the command is `python -m models.import_darknet`."""
