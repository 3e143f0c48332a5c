"""`minisgl doctor`: what is installed here, which parts work on this machine, and why one does not.

`checks` finds out, by running a small case of each part against plain torch; `main` prints tables of it.
"""

from minisgl.doctor.main import main

__all__ = ["main"]
