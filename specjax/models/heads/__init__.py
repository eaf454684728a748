"""Small trained networks that help to draft; training makes them, drafters run them."""
