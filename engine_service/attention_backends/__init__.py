"""Ways to compute attention over the paged cache, all fed by the same index arrays of a plan."""
