"""Decisions: which task runs on which worker. Standard library only; no torch, no ray, no clock, no randomness."""

if __name__ != "modelpool.scheduler":
    raise ImportError(f"import modelpool.scheduler, not {__name__}: a process must not hold two copies of one module")
