"""Weight patches whose strength follows the steps of a run, one group a condition."""
