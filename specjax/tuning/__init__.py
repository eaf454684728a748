"""Finds the best settings of methods, and the best method, for a target and a machine."""
