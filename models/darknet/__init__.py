"""Darknet: cfg and weights files, and their network as a `tf.Module`; `models.import_darknet` converts one."""
