"""The state machine: events in, commands out; retries, recovery, quarantine, invariants, snapshots."""
