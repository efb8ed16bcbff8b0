"""PoolConfig: the configuration file and its validation."""
