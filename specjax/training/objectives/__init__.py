"""One objective per kind of drafter: its loss, its batches, its validation."""
