"""Speed compared with peers: `make bench` runs the race and writes README.md here."""
