"""Output files on disk: images, videos and audio with their recipes, the manifest, the contact sheet."""
