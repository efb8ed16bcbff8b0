"""Builds and reads vision encoders."""
