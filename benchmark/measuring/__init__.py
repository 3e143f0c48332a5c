"""Library of the scripts beside this folder: workloads, a load generator, engines to compare, figures, plots.

Every workload is made from seeds and is the same in every process. Times are `time.monotonic` seconds, which all
processes of a machine share; names say the unit where it is another.
"""
