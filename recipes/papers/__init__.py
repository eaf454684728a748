"""Recipes of the papers' tables and figures, and their runner: `specjax reproduce`."""
