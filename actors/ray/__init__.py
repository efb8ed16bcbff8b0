"""Modules that connect to Ray: sessions, actors, fleets, code shipping."""
