"""Finds the best settings of a method for a target."""
