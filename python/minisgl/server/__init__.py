"""The server: the supervisor, which starts and watches all processes, and the API server.

The supervisor waits for workers and, by `signal_socket`, for signals at the same time.
"""
