"""What all commands share: options, tables, sessions, interrupts."""
