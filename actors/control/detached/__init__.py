"""Jobs that outlive their driver: the journal, and the service that runs what it contains."""
