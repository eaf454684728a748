"""Finding the settings of a method that serve a target best."""
