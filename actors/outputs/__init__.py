"""What is left on disk: pictures with their recipes, the manifest and the contact sheet."""
