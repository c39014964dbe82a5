"""What the entry points share: Hydra, readable errors, the machine, one run from start to end."""
