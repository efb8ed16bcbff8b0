"""One GPU in one process: runs tasks, batches them, retries after OOM; explicit control."""
