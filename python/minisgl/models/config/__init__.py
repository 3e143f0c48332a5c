"""A model's configuration: its type, and how a Hugging Face folder is read. No torch: the supervisor reads it."""
