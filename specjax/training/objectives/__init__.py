"""One objective per kind of drafter: its options, its head and its loss."""
