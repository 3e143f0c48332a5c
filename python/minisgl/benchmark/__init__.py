"""Measuring code that the scripts in benchmark/ are made of, and that other programs may use.

Every workload is made from seeds and is the same in every process. Times are `time.monotonic` seconds, which all
processes of a machine share; names say the unit where it is another.
"""
