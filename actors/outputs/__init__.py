"""Outputs in a folder or an object store: images, videos and audio with recipes, the manifest, the contact sheet."""
