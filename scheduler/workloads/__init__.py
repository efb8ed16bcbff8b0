"""Jobs to try the scheduler with: invented ones, ones after a published trace, and traces as lines of text."""
