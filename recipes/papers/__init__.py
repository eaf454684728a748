"""The tables and figures of the papers as recipes, and what runs them: `specjax reproduce`."""
