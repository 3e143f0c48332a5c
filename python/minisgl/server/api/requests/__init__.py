"""Requests under way: `engine_client` owns every `open_request` and hands it the engine's messages; `queries` asks the
workers about everything else.
"""
