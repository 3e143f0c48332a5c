"""The routes, a module per topic. A handler parses, asks the engine and answers; `Service` is all it knows."""
