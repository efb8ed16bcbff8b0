"""The HTTP interfaces as an application of Ray Serve: `serve run modelpool.ray_serve:app config=modelpool.toml`."""

from modelpool.actors.http.ray_serve.ingress import app

__all__ = ["app"]
