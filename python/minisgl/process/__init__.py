"""Worker processes: `child` starts one, `worker` is the start of each; `machine` has the resources that they take,
`run_dir` the folder of their sockets, and `hang_watch` finds tensor-parallel ranks that hang.
"""
