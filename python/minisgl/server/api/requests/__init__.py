"""Requests under way: `client` owns each `open_request`, takes what the engine sends, and asks `questions`."""
