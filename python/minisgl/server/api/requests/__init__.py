"""Requests under way: `engine_client` owns each `open_request`, takes what the engine sends, and asks `queries`."""
