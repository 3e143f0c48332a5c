"""The routes, one module for each topic. A handler parses the body, asks the engine and answers, through `Service`."""
