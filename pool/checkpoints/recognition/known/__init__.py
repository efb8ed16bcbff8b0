"""The families that are recognised: the rows of the table of `pool.checkpoints.recognition.signatures`."""
