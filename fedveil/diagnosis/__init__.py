"""What a round shows of its clients, and what that says about a run: measured, then explained."""
