"""Speed beside the peers: `make bench` races them and writes README.md here."""
