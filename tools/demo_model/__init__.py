"""Making of Minisgl's built-in demo model: its skills, its training and its scores."""
