"""Find problems of a run from its recorded metrics, and suggest changes."""
