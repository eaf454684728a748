"""The target model and the drafter heads, as Flax modules with pure methods."""
