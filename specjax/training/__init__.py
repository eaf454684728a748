"""Training of drafters: one loop for all, one objective per kind."""
