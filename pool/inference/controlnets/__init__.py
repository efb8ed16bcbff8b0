"""ControlNets: kinds, configurations, building and calling."""
