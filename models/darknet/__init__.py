"""Darknet: cfg and weights files, and the network that they describe as a `tf.Module`; `models.import_darknet` is the command."""
