"""The server: the supervisor that starts and watches all processes, and the API server."""
