"""The values and tables of the core: messages, jobs, tasks, workers, nodes, learned run times."""
