"""The objects of a driver script: ModelPool, Jobs, StageResult."""
