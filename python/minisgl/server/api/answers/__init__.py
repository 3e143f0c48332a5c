"""Answers of generating routes: each route has a function from its body to a job, and a writer of the job's output.

`answer` is the HTTP side, from submission to the last byte. Response objects are declared beside their writers.
"""
