"""How the server is: its pulse (`heartbeat`), counters and histograms (`metrics`), and their text (`prometheus`)."""
