"""What is under way: `client` owns every `open_request` and takes what the engine sends, as a `delta` for each choice;
`questions` are those that generate nothing.
"""
