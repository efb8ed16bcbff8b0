"""The only package that imports ray: the worker actor, the controller, the client and the command line."""

if __name__ != "modelpool.actors":
    raise ImportError(f"import modelpool.actors, not {__name__}: a process must not hold two copies of one module")
