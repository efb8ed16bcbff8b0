"""One GPU, one process: weights, patches, residency and the stages that run on them.

Knows torch. Does not know Ray, the scheduler or other GPUs. Importing this package imports nothing else,
so that its torch-free modules (`spec`, `errors`, `residency`) stay torch-free.
"""
