"""Outcomes and progress of jobs and tasks, as a driver reads them."""
