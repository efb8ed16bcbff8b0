"""Metrics of a pool for Prometheus and Ray, and traces of its jobs for OpenTelemetry."""
