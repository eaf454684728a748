"""The papers' claims, in shape, against what is measured here: `specjax bench claims`."""
