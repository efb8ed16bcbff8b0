"""The only package that imports ray: the worker actor, the controller, the client and the command line."""
