"""The drafting methods, one file each; `_trees` and `_heads` hold what several share."""
