"""Who waits, in which order, under which limits."""
