"""How a user's function is taken, named and run while it is traced."""
