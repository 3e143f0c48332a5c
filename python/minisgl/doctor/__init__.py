"""`minisgl doctor`: the installed packages, the parts that work on this machine, and the reasons why others do not.

`findings` says which parts a device could use and tries them, with the `cases`, which compare each with plain torch.
"""
