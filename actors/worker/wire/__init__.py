"""Messages between driver, controller and workers, and how they are packed."""
