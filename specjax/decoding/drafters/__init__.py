"""The drafting methods; `length_rules` and files that begin with _ are parts of them."""
