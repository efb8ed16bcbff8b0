"""The order of the waiting tasks: fair queue, deadlines, limits, demand."""
