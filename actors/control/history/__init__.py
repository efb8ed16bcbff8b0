"""The history of a pool: events and costs of months, in an SQLite file beside its journal."""
