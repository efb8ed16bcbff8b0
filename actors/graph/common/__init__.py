"""What features and the graph share: output shapes, sampling runs, the tasks of a job, the protocol of catalogs."""
