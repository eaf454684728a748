"""Recipes for the tables and figures of papers: what they hold, their data and their figures."""
