"""The core in virtual time over simulated GPUs, and the metrics that come out."""
