"""The core in virtual time over simulated GPUs, and the resulting metrics."""
