"""The drafting methods, one file each; files that begin with _ hold shared code."""
