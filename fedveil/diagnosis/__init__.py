"""Find problems in a run from its recorded metrics, and suggest changes."""
