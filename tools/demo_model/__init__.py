"""How Minisgl's built-in demo model is made: its skills, its training and its scores."""
