"""Worker processes: how one is started, and what each begins with."""
