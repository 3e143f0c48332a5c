"""Answers: each route that generates makes a job of its body and has a writer of what comes back.

`answer` is the HTTP side of that, from submission to the last byte. Forms are declared beside their writers.
"""
